"""The messages of a HyperparameterTuningJob, as those of `messages`: a study, and the CustomJob of each trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import ClassVar

from penstock_components.jobs.messages import CustomJobSpec, EncryptionSpec, Message, enumeration, int64

ALGORITHMS: Mapping[str, int] = MappingProxyType(
    {"ALGORITHM_UNSPECIFIED": 0, "GRID_SEARCH": 2, "RANDOM_SEARCH": 3}
)
OBSERVATION_NOISES: Mapping[str, int] = MappingProxyType(
    {"OBSERVATION_NOISE_UNSPECIFIED": 0, "LOW": 1, "HIGH": 2}
)
MEASUREMENT_SELECTIONS: Mapping[str, int] = MappingProxyType(
    {"MEASUREMENT_SELECTION_TYPE_UNSPECIFIED": 0, "LAST_MEASUREMENT": 1, "BEST_MEASUREMENT": 2}
)
SCALES: Mapping[str, int] = MappingProxyType(
    {
        "SCALE_TYPE_UNSPECIFIED": 0,
        "UNIT_LINEAR_SCALE": 1,
        "UNIT_LOG_SCALE": 2,
        "UNIT_REVERSE_LOG_SCALE": 3,
    }
)
GOALS: Mapping[str, int] = MappingProxyType({"GOAL_TYPE_UNSPECIFIED": 0, "MAXIMIZE": 1, "MINIMIZE": 2})


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetyMetricConfig(Message):
    """Makes a metric a constraint."""

    safety_threshold: float = 0.0
    desired_min_safe_trials_fraction: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec(Message):
    """What is tuned."""

    metric_id: str = ""
    goal: str = enumeration(GOALS)
    safety_config: SafetyMetricConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DoubleValueSpec(Message):
    """Any number of a range."""

    min_value: float = 0.0
    max_value: float = 0.0
    default_value: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerValueSpec(Message):
    """Any integer of a range."""

    min_value: int = int64()
    max_value: int = int64()
    default_value: int | None = field(default=None, metadata={"int64": True})


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoricalValueSpec(Message):
    """One of some texts."""

    values: tuple[str, ...] = ()
    default_value: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscreteValueSpec(Message):
    """One of some numbers."""

    values: tuple[float, ...] = ()
    default_value: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscreteValueCondition(Message):
    """Values of the parent at which a conditional parameter is active."""

    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class IntValueCondition(Message):
    """Values of the parent at which a conditional parameter is active."""

    values: tuple[int, ...] = field(default=(), metadata={"int64": True})


@dataclass(frozen=True, kw_only=True, slots=True)
class CategoricalValueCondition(Message):
    """Values of the parent at which a conditional parameter is active."""

    values: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionalParameterSpec(Message):
    """A parameter that exists only at some values of its parent."""

    ONE_OF: ClassVar[tuple[str, ...]] = (
        "parent_discrete_values",
        "parent_int_values",
        "parent_categorical_values",
    )

    parent_discrete_values: DiscreteValueCondition | None = None
    parent_int_values: IntValueCondition | None = None
    parent_categorical_values: CategoricalValueCondition | None = None
    parameter_spec: ParameterSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec(Message):
    """One parameter; the service appends `--<parameter_id>=<value>` to the trial's arguments."""

    ONE_OF: ClassVar[tuple[str, ...]] = (
        "double_value_spec",
        "integer_value_spec",
        "categorical_value_spec",
        "discrete_value_spec",
    )

    double_value_spec: DoubleValueSpec | None = None
    integer_value_spec: IntegerValueSpec | None = None
    categorical_value_spec: CategoricalValueSpec | None = None
    discrete_value_spec: DiscreteValueSpec | None = None
    parameter_id: str = ""
    scale_type: str = enumeration(SCALES)
    conditional_parameter_specs: tuple[ConditionalParameterSpec, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DecayCurveAutomatedStoppingSpec(Message):
    """Stops a trial whose curve is unlikely to become the best."""

    use_elapsed_duration: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MedianAutomatedStoppingSpec(Message):
    """Stops a trial that is worse than the median of the others at its time."""

    use_elapsed_duration: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvexAutomatedStoppingSpec(Message):
    """Stops a trial whose curve, extrapolated, is unlikely to become the best."""

    max_step_count: int = int64()
    min_step_count: int = int64()
    min_measurement_count: int = int64()
    learning_rate_parameter_name: str = ""
    use_elapsed_duration: bool = False
    update_all_stopped_trials: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTimeConstraint(Message):
    """Until when a study goes on."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("max_duration", "end_time")

    max_duration: timedelta | None = None
    end_time: str | None = None
    """RFC 3339."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyStoppingConfig(Message):
    """When a study ends by itself."""

    should_stop_asap: bool | None = None
    minimum_runtime_constraint: StudyTimeConstraint | None = None
    maximum_runtime_constraint: StudyTimeConstraint | None = None
    min_num_trials: int | None = None
    max_num_trials: int | None = None
    max_num_trials_no_progress: int | None = None
    max_duration_no_progress: timedelta | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StudySpec(Message):
    """What is searched, for which metric, and how."""

    ONE_OF: ClassVar[tuple[str, ...]] = (
        "decay_curve_stopping_spec",
        "median_automated_stopping_spec",
        "convex_automated_stopping_spec",
    )

    decay_curve_stopping_spec: DecayCurveAutomatedStoppingSpec | None = None
    median_automated_stopping_spec: MedianAutomatedStoppingSpec | None = None
    convex_automated_stopping_spec: ConvexAutomatedStoppingSpec | None = None
    metrics: tuple[MetricSpec, ...] = ()
    parameters: tuple[ParameterSpec, ...] = ()
    algorithm: str = enumeration(ALGORITHMS)
    observation_noise: str = enumeration(OBSERVATION_NOISES)
    measurement_selection_type: str = enumeration(MEASUREMENT_SELECTIONS)
    study_stopping_config: StudyStoppingConfig | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperparameterTuningJob(Message):
    """A study whose trials are CustomJobs."""

    OUTPUT_ONLY: ClassVar[tuple[str, ...]] = (
        "name", "trials", "state", "create_time", "start_time", "end_time", "update_time", "error",
        "satisfies_pzs", "satisfies_pzi",
    )  # fmt: skip

    display_name: str = ""
    study_spec: StudySpec | None = None
    max_trial_count: int = 0
    parallel_trial_count: int = 0
    max_failed_trial_count: int = 0
    trial_job_spec: CustomJobSpec | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    encryption_spec: EncryptionSpec | None = None
