"""Batches: several metadata calls in one `multipart/mixed` request, each answered as if it had come alone."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from email import message_from_bytes, policy
from email.message import MIMEPart
from http import HTTPStatus
from urllib.parse import urlsplit

from penstock_local.storage.errors import InvalidRequestError, StorageError
from penstock_local.storage.json_api import Call, JsonApi, query_of
from penstock_local.storage.media import check_conditional_headers, check_headers

MAX_CALLS = 100


def run_batch(api: JsonApi, batch: Call) -> tuple[bytes, str]:
    """Run the calls in order; returns the body of the answer and its content type. Blocks like the calls do.

    Raises InvalidRequestError when it is not a batch; what goes wrong in a call is that call's answer.
    """
    content_type = batch.headers.get("content-type", "")
    message = message_from_bytes(
        b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + batch.body, policy=policy.HTTP
    )
    parts = list(message.iter_parts()) if message.is_multipart() else []
    if not 1 <= len(parts) <= MAX_CALLS:
        raise InvalidRequestError(
            f"the batch has {len(parts)} calls in multipart/mixed; it takes 1 to {MAX_CALLS}."
        )
    boundary = f"batch_{uuid.uuid4().hex}"
    answers = [_answer(api, batch, part) for part in parts]
    body = b"".join(f"--{boundary}\r\n".encode() + answer + b"\r\n" for answer in answers)
    return body + f"--{boundary}--\r\n".encode(), f"multipart/mixed; boundary={boundary}"


def _answer(api: JsonApi, batch: Call, part: MIMEPart) -> bytes:
    status, value = 200, None
    try:
        call = _read_call(batch, part)
        check_conditional_headers(call.method, call.headers)
        check_headers(call.headers)
        value = api.handle(call)
        status = 204 if value is None else 200
    except StorageError as error:
        status, value = error.status, error.to_json()
    content = b"" if value is None else json.dumps(value).encode()
    content_id = part.get("content-id", "").strip("<>")
    head = (
        f"Content-Type: application/http\r\nContent-ID: <response-{content_id}>\r\n\r\n"
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        f"Content-Type: application/json; charset=UTF-8\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _read_call(batch: Call, part: MIMEPart) -> Call:
    inner = part.get_payload(decode=True)
    assert isinstance(inner, bytes)
    request_line, _, rest = inner.lstrip().partition(b"\n")
    words = request_line.decode("latin-1").split()
    if part.get_content_type() != "application/http" or len(words) < 2:
        raise InvalidRequestError(
            "every part of a batch must be application/http and begin with METHOD path."
        )
    message = message_from_bytes(rest, policy=policy.HTTP)
    url = urlsplit(words[1])
    body = message.get_payload(decode=True)
    return replace(
        batch,
        method=words[0],
        path=url.path,
        query=query_of(url.query),
        headers={name.lower(): value for name, value in message.items()},
        body=body.strip() if isinstance(body, bytes) else b"",
    )
