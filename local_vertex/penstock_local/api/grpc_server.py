"""gRPC: generic handlers for every known method, over TLS on a loopback port."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from penstock_local.api.dispatch import CallContext, Dispatcher
from penstock_local.api.errors import ApiError
from penstock_local.api.messages import deserialize, serialize
from penstock_local.api.methods import Method
from penstock_local.frontdoor.auth import RequireTokenInterceptor, TokenVerifier
from penstock_local.frontdoor.certificates import Identity

# Each waiting launcher holds a thread (see JobService.get_custom_job), so there are more than the machine has cores.
_THREADS = 128
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024


def start_grpc_server(
    dispatcher: Dispatcher, identity: Identity, verifier: TokenVerifier
) -> tuple[grpc.Server, int]:
    """Start serving on 127.0.0.1; returns the server and its port."""
    server = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc"),
        handlers=[_Handlers(dispatcher)],
        interceptors=[RequireTokenInterceptor(verifier)],
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)],
    )
    credentials = grpc.ssl_server_credentials(
        [(identity.leaf_key_file.read_bytes(), identity.leaf_file.read_bytes())]
    )
    port: int = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return server, port


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def service(self, details: Any) -> Any:
        """The handler of a method, or None, which grpc answers with UNIMPLEMENTED."""
        method = self._dispatcher.methods.get(details.method)
        if method is None:
            return None
        metadata = {item.key: item.value for item in details.invocation_metadata}
        context = CallContext(
            user_agent=f"{metadata.get('x-goog-api-client', '')} {metadata.get('user-agent', '')}"
        )
        return grpc.unary_unary_rpc_method_handler(
            self._behaviour(method, context),
            request_deserializer=lambda data: deserialize(method.request_type, data),
            response_serializer=serialize,
        )

    def _behaviour(self, method: Method, context: CallContext) -> Callable[[Any, grpc.ServicerContext], Any]:
        def answer(request: Any, servicer_context: grpc.ServicerContext) -> Any:
            try:
                return self._dispatcher.call(method, request, context)
            except ApiError as exc:
                return servicer_context.abort(exc.code, str(exc))

        return answer
