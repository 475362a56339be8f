"""What is trained: the built-in decoder by shape, a Hugging Face directory, or what a user's function builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from penstock_trainer.contract.fields import require

RopeKind = Literal["linear", "llama3", "yarn"]
Family = Literal["llama", "mistral", "qwen2", "qwen3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How rotary positions are stretched beyond the length that the angles were made for.

    The names and formulas are those of `rope_scaling` in Hugging Face configs.
    """

    kind: RopeKind
    factor: float
    """Ratio of the lengths after and before."""
    original_max_position: int = 0
    """Positions before stretching (llama3 and yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor stay."""
    beta_fast: float = 32.0
    """yarn: dims that turn more often than this over the original length stay."""
    beta_slow: float = 1.0
    """yarn: dims that turn less often than this are stretched in full."""

    def __post_init__(self) -> None:
        require(self.factor >= 1, "model.rope_scaling.factor", self.factor, "at least 1")
        require(
            self.kind == "linear" or self.original_max_position > 0,
            "model.rope_scaling.original_max_position",
            self.original_max_position,
            f"positive for {self.kind}",
        )
        require(
            self.low_freq_factor < self.high_freq_factor,
            "model.rope_scaling.low_freq_factor",
            self.low_freq_factor,
            f"less than high_freq_factor ({self.high_freq_factor})",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The model and where its first weights come from.

    With `source` empty, the built-in decoder of the shape below, initialised from the seed; its vocabulary is the
    dataset's. With a `source`, the shape is the source's: fields of the shape must then be left alone.
    """

    source: str = ""
    """Empty; or a Hugging Face directory (gs://, file:// or an absolute path): architecture, shape and first weights;
    or `module:function`, called with `options`, which returns the torch module to train."""
    native: bool = True
    """Of a directory whose family the built-in decoder covers, train the built-in decoder. False: transformers' own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the user's function."""
    family: Family = "llama"
    """Whose architecture the shape below is, and the name under which the decoder is exported. `qwen2` has biases on
    query, key and value; `qwen3` normalises queries and keys; `mistral` may have a sliding window."""
    dim: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    """Grouped-query attention when smaller than num_heads."""
    head_dim: int | None = None
    """Dims of a head. None: dim / num_heads."""
    ffn_dim: int = 352
    """Inner width of SwiGLU."""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Positions that a token sees, itself included. None: all before it."""
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    """The output head shares the token embedding's weight."""
    dropout: float = 0.0
    """Share of the elements that each layer adds to the residual stream that are zeroed in training."""

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim"):
            value = getattr(self, name)
            require(value > 0, f"model.{name}", value, "a positive number")
        require(
            self.head_dim is not None or self.dim % self.num_heads == 0,
            "model.dim",
            self.dim,
            f"a multiple of num_heads ({self.num_heads}), or head_dim given",
        )
        name, value = ("head_dim", self.head_dim) if self.head_dim is not None else ("dim", self.dim)
        require(
            self.dims_per_head > 0 and self.dims_per_head % 2 == 0,
            f"model.{name}",
            value,
            "a positive even number of dims per head (RoPE turns pairs)",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "model.num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads ({self.num_heads})",
        )
        require(
            self.sliding_window is None or (self.family == "mistral" and self.sliding_window > 0),
            "model.sliding_window",
            self.sliding_window,
            "positive, and given for mistral only",
        )
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "in [0, 1)")
        require(
            bool(self.source) or not self.options,
            "model.options",
            dict(self.options),
            "empty without model.source = 'module:function'",
        )
        if self.source:
            self._require_no_shape()

    def _require_no_shape(self) -> None:
        given = {"source", "native", "options", "dropout"}
        for one in fields(self):
            if one.name not in given:
                require(
                    getattr(self, one.name) == one.default,
                    f"model.{one.name}",
                    getattr(self, one.name),
                    f"left alone: the shape comes from model.source = {self.source!r}",
                )

    @property
    def dims_per_head(self) -> int:
        """head_dim, given or derived."""
        return self.head_dim if self.head_dim is not None else self.dim // self.num_heads
