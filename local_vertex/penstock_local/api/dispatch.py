"""From a method to the service function that answers it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_local.api.errors import ApiError, UnimplementedError
from penstock_local.api.methods import Method

logger = logging.getLogger(__name__)

_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a handler may know of the caller beyond the request."""

    user_agent: str
    """The x-goog-api-client header, which names the client library."""


Handler = Callable[[Any, CallContext], Any]


class Dispatcher:
    """Finds the handler of each method among the services: the method's name in snake_case."""

    def __init__(self, methods: Mapping[str, Method], services: Mapping[str, object]) -> None:
        """`services` maps a service's short name, such as `JobService`, to the object with its handlers."""
        self.methods = methods
        self._handlers: dict[str, Handler] = {}
        for path, method in methods.items():
            service = services.get(path.split("/")[1].rpartition(".")[2])
            handler = getattr(service, _WORD_START.sub("_", method.name).lower(), None)
            if handler is not None:
                self._handlers[path] = handler

    @property
    def implemented(self) -> list[str]:
        """Paths of the methods that have a handler."""
        return sorted(self._handlers)

    def call(self, method: Method, request: Any, context: CallContext) -> Any:
        """The response message. Raises ApiError; what is not one becomes INTERNAL, with its traceback in the log."""
        handler = self._handlers.get(method.path)
        if handler is None:
            raise UnimplementedError(f"{method.name} is not implemented by the stand-in.")
        try:
            return handler(request, context)
        except ApiError:
            raise
        except Exception as exc:
            logger.exception("%s failed", method.name)
            raise ApiError(f"{method.name} failed inside the stand-in: {exc!r}") from exc
