"""How payloads travel to and from Cloud Storage: one request for each object or range, from and into memory.

Everything goes over the XML API, which takes the checksum as a header, in single requests. There are no multipart
uploads, whose parts would be left behind, and billed, by a process that is killed: an upload that is cut off leaves
nothing to be listed or aborted.
"""

from __future__ import annotations

import html
import logging
import re
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock_trainer.storage.objects import crc32c as crc32c_of

if TYPE_CHECKING:
    import requests
    from google.cloud.storage import Client
    from obstore.store import GCSCredential, GCSStore

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 60.0
"""Without a byte from the server, or taken by it."""

log = logging.getLogger(__name__)

_CODE = re.compile(r"<(Code|Message|Details)>(.*?)</\1>", re.DOTALL)
_DIGEST_CODES = ("BadDigest", "InvalidDigest")
_REFRESH_BEFORE = timedelta(minutes=5)


class NotSentError(ConnectionError):
    """This way did not carry the bytes; another try can. A ConnectionError, because those are what is retried."""


class DamagedError(ConnectionError):
    """Other bytes arrived than were sent. Nothing of them is left, and another try can carry the right ones."""


class Transfer(Protocol):
    """One way for an object's bytes to Cloud Storage: clients differ in what they cost, not in what they promise."""

    def put(
        self,
        bucket: str,
        name: str,
        data: memoryview,
        *,
        crc32c: str,
        if_generation_match: int | None,
        content_type: str,
    ) -> int:
        """Try once to make `data`, bytes of one dimension, the object; its generation. The buffer is not copied.

        What is there after it returns has this CRC32C, as the server computed it. Raises DamagedError, or what
        google-cloud-storage would raise: GoogleAPIError by status, GoogleAuthError, and requests' and urllib3's errors.
        """


class SessionTransfer:
    """Over the HTTP session of google-cloud-storage's client: its credentials, proxies and certificates.

    The buffer goes to the socket as it is, whereas Blob's uploads copy it and its downloads join it from small chunks.
    The server is told the CRC32C and refuses other bytes, which therefore are never seen by anybody.
    """

    def __init__(self, client: Client, *, timeout_seconds: float = IDLE_SECONDS) -> None:
        """`timeout_seconds`: for how long nothing may move."""
        from google.api_core.exceptions import from_http_status

        self._timeout = (min(CONNECT_SECONDS, timeout_seconds), min(IDLE_SECONDS, timeout_seconds))
        self._session: requests.Session = client._http
        self._endpoint = client.api_endpoint.rstrip("/")
        self._error_of = from_http_status

    def put(
        self,
        bucket: str,
        name: str,
        data: memoryview,
        *,
        crc32c: str,
        if_generation_match: int | None,
        content_type: str,
    ) -> int:
        """See Transfer.put."""
        headers = {"content-type": content_type, "x-goog-hash": f"crc32c={crc32c}"}
        if if_generation_match is not None:
            headers["x-goog-if-generation-match"] = str(if_generation_match)
        with self._request("PUT", bucket, name, headers=headers, data=data) as answer:
            stored = _told_crc32c(answer.headers)
            generation = int(answer.headers["x-goog-generation"])
        if stored not in (None, crc32c):
            self.delete(bucket, name, generation)
            raise DamagedError(f"the server stored CRC32C {stored} instead of {crc32c}")
        return generation

    def get(self, bucket: str, name: str, start: int, length: int | None, generation: int | None) -> bytes:
        """Try once to read [start, start + length); fewer bytes when the object ends before.

        All of the object is verified against its CRC32C and raises DamagedError; a range cannot be.
        """
        headers = {"accept-encoding": "gzip"}  # bytes as they are stored
        if start or length is not None:
            headers["range"] = f"bytes={start}-{'' if length is None else start + length - 1}"
        with self._request("GET", bucket, name, generation=generation, headers=headers) as answer:
            data: bytes = answer.raw.read(decode_content=False)
            expected = int(answer.headers.get("content-length", len(data)))
            stored = _told_crc32c(answer.headers)
        if len(data) != expected:
            raise NotSentError(f"the answer has {len(data)} bytes of {expected}")
        if "range" not in headers and stored not in (None, crc32c_of(data)):
            raise DamagedError(f"read bytes of CRC32C {crc32c_of(data)}, the object has {stored}")
        return data

    def stored_crc32c(self, bucket: str, name: str, generation: int) -> str | None:
        """What the server computed over the object; None when it does not say."""
        with self._request("HEAD", bucket, name, generation=generation) as answer:
            return _told_crc32c(answer.headers)

    def delete(self, bucket: str, name: str, generation: int) -> None:
        """Remove the object if it is still in this generation."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        try:
            headers = {"x-goog-if-generation-match": str(generation)}
            self._request("DELETE", bucket, name, headers=headers).close()
        except (NotFound, PreconditionFailed):
            pass  # another writer has replaced it

    def _request(
        self,
        method: str,
        bucket: str,
        name: str,
        *,
        generation: int | None = None,
        headers: Mapping[str, str] | None = None,
        data: memoryview | None = None,
    ) -> requests.Response:
        # A slash in the name is escaped too: HTTP clients would resolve `..` between slashes.
        url = f"{self._endpoint}/{bucket}/{urllib.parse.quote(name, safe='~')}"
        params = {} if generation is None else {"generation": str(generation)}
        answer = self._session.request(
            method,
            url,
            params=params,
            headers=dict(headers or {}),
            data=data,  # type: ignore[arg-type]  # any buffer goes to the socket as it is
            stream=method
            == "GET",  # read by us; of the others the end is read, so that the connection is used again
            timeout=self._timeout,
        )
        if answer.status_code >= 300:
            with answer:
                raise self._failure(answer)
        return answer

    def _failure(self, answer: requests.Response) -> Exception:
        told = {name: html.unescape(text) for name, text in _CODE.findall(answer.text)}
        if told.get("Code") in _DIGEST_CODES:
            return DamagedError(f"the server refused the bytes: {told.get('Details', told.get('Message'))}")
        message = " ".join(told.values()) or answer.text[:500] or answer.reason
        failure: Exception = self._error_of(answer.status_code, message, response=answer)
        return failure


class ObstoreTransfer:
    """Through obstore, whose TLS costs the least CPU; what it cannot do goes over the session.

    Measured with tests/benchmarks/transfer_arms.py, CPU seconds for a GB in objects of 64 MiB, CRC32C included: with TLS
    0.55 (session 0.85, Blob 1.40), without 0.36 (0.36, 1.03). Its downloads cost more than the session's.

    It follows the environment's proxies by itself, and is given the session's certificates and the client's
    credentials. It has no way of sending a CRC32C: the server's is read afterwards, and other bytes are removed. Until
    then they can be seen, and what they replaced is gone until the next try. Its own retries are off: of its errors
    only a condition that failed has a meaning that can be relied on, everything else is NotSentError. Raises
    ImportError where obstore is not installed.
    """

    def __init__(self, client: Client, session: SessionTransfer, *, timeout_seconds: float) -> None:
        import obstore
        from google.api_core.exceptions import PreconditionFailed

        self._obstore, self._precondition_failed = obstore, PreconditionFailed
        self._session = session
        self._endpoint = client.api_endpoint.rstrip("/")
        self._token = _TokenSource(client)
        self._client_options: dict[str, Any] = {
            "allow_http": self._endpoint.startswith("http:"),
            "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, timeout_seconds)),
            "timeout": timedelta(seconds=timeout_seconds),
            **_certificates(client._http, self._endpoint),
        }
        self._stores: dict[str, GCSStore] = {}
        self._lock = threading.Lock()

    def put(
        self,
        bucket: str,
        name: str,
        data: memoryview,
        *,
        crc32c: str,
        if_generation_match: int | None,
        content_type: str,
    ) -> int:
        """See Transfer.put."""
        # obstore has no condition on a generation alone, and it would write `/a` and `a//` as `a`.
        if if_generation_match or not all(part not in ("", ".", "..") for part in name.split("/")):
            return self._session.put(
                bucket,
                name,
                data,
                crc32c=crc32c,
                if_generation_match=if_generation_match,
                content_type=content_type,
            )
        generation = self._put(bucket, name, data, content_type, create=if_generation_match == 0)
        stored = self._session.stored_crc32c(bucket, name, generation)
        if stored != crc32c:
            self._session.delete(bucket, name, generation)
            raise DamagedError(f"the server stored CRC32C {stored} instead of {crc32c}")
        return generation

    def _put(self, bucket: str, name: str, data: memoryview, content_type: str, *, create: bool) -> int:
        errors = self._obstore.exceptions
        try:
            written = self._obstore.put(
                self._store(bucket),
                name,
                data,
                attributes={"Content-Type": content_type},
                mode="create" if create else "overwrite",
                use_multipart=False,
            )
            return int(written["version"] or "")
        except (errors.AlreadyExistsError, errors.PreconditionError) as exc:
            raise self._precondition_failed(str(exc)) from exc
        except Exception as exc:  # what the trouble was, the session finds out
            log.info("gs://%s/%s: obstore did not write it, google-cloud-storage will: %s", bucket, name, exc)
            raise NotSentError(f"obstore: {exc}") from exc

    def _store(self, bucket: str) -> GCSStore:
        with self._lock:
            if bucket not in self._stores:
                self._stores[bucket] = self._obstore.store.GCSStore(
                    bucket,
                    config={"base_url": self._endpoint},
                    client_options=self._client_options,  # type: ignore[arg-type]  # put together from two parts
                    retry_config={"max_retries": 0},
                    credential_provider=self._token,
                )
            return self._stores[bucket]


class _TokenSource:
    """The client's credentials as obstore asks for them, refreshed when they are about to run out."""

    def __init__(self, client: Client) -> None:
        from google.auth.transport.requests import Request

        self._credentials = client._credentials
        self._request: Callable[..., Any] = Request()
        self._lock = threading.Lock()

    def __call__(self) -> GCSCredential:
        with self._lock:
            credentials = self._credentials
            utc = timezone.utc  # noqa: UP017  # the launcher also runs on Python 3.10
            expiry = credentials.expiry.replace(tzinfo=utc) if credentials.expiry else None
            if not credentials.valid or (expiry and expiry - datetime.now(utc) < _REFRESH_BEFORE):
                credentials.refresh(self._request)
                expiry = credentials.expiry.replace(tzinfo=utc) if credentials.expiry else None
            # Anonymous credentials have no token; obstore must send one, which such a server does not look at.
            return {"token": credentials.token or "anonymous", "expires_at": expiry}


def _certificates(session: requests.Session, endpoint: str) -> dict[str, bytes]:
    """What the session trusts (REQUESTS_CA_BUNDLE, or what it was given) where that is not the system's."""
    verify = session.merge_environment_settings(endpoint, {}, None, None, None)["verify"]
    if not isinstance(verify, str) or not Path(verify).is_file():
        return {}
    return {"root_certificate": Path(verify).read_bytes()}


def _told_crc32c(headers: Mapping[str, str]) -> str | None:
    for item in headers.get("x-goog-hash", "").split(","):
        algorithm, _, digest = item.strip().partition("=")
        if algorithm == "crc32c":
            return digest
    return None
