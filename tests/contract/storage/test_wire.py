"""The wire itself: error shapes, resumable sessions that break off, and inputs that must not be ignored."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import socket
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

import google_crc32c
import pytest
import requests
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage

from penstock_local.storage import ObjectStore

CHUNK = 256 * 1024


@pytest.fixture
def objects(endpoint: str, bucket: storage.Bucket) -> str:
    return f"{endpoint}/storage/v1/b/{bucket.name}/o"


@pytest.fixture
def upload(endpoint: str, bucket: storage.Bucket) -> str:
    return f"{endpoint}/upload/storage/v1/b/{bucket.name}/o"


def begin(http: requests.Session, upload: str, name: str = "x", **headers: str) -> str:
    answer = http.post(upload, params={"uploadType": "resumable", "name": name}, headers=headers)
    assert answer.status_code == 200
    return answer.headers["location"]


def payloads(store: ObjectStore) -> set[str]:
    probe = store.stage()
    probe.discard()
    return {path.name for path in probe.path.parent.iterdir()}


def test_an_authorized_session_uploads_media_and_reads_it_back(upload: str, objects: str) -> None:
    session = AuthorizedSession(AnonymousCredentials())
    answer = session.post(
        upload,
        params={"uploadType": "media", "name": "a/b"},
        data=b"data",
        headers={"content-type": "text/x"},
    )
    assert (answer.json()["name"], answer.json()["size"], answer.json()["contentType"]) == (
        "a/b",
        "4",
        "text/x",
    )
    read = session.get(f"{objects}/a%2Fb", params={"alt": "media"})
    assert (read.content, read.headers["x-goog-generation"]) == (b"data", answer.json()["generation"])
    assert read.headers["etag"] == answer.json()["etag"]
    session.close()


def test_a_json_error_has_the_shape_of_google_apis(
    http: requests.Session, objects: str, bucket: storage.Bucket
) -> None:
    answer = http.get(f"{objects}/none")
    message = f"No such object: {bucket.name}/none."
    assert (answer.status_code, answer.json()) == (
        404,
        {
            "error": {
                "code": 404,
                "message": message,
                "errors": [{"message": message, "domain": "global", "reason": "notFound"}],
            }
        },
    )


def test_an_xml_error_is_a_document(http: requests.Session, endpoint: str, bucket: storage.Bucket) -> None:
    for url, status, code in (
        (f"{endpoint}/{bucket.name}/none", 404, "NoSuchKey"),
        (f"{endpoint}/no-such-bucket/none", 404, "NoSuchBucket"),
        (f"{endpoint}/{bucket.name}/none?acl", 501, "NotImplemented"),
    ):
        answer = http.get(url)
        assert (answer.status_code, ElementTree.fromstring(answer.text).findtext("Code")) == (status, code)


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"x-goog-hash": "crc32c=AAAAAA=="}, "BadDigest"),
        ({"content-md5": base64.b64encode(bytes(16)).decode()}, "BadDigest"),
        ({"x-goog-if-generation-match": "7"}, "PreconditionFailed"),
        ({"x-goog-acl": "public-read"}, "NotImplemented"),
        ({"x-goog-encryption-algorithm": "AES256"}, "NotImplemented"),
        ({"if-none-match": "*"}, "NotImplemented"),
        ({"x-goog-if-generation-match": "one"}, "InvalidArgument"),
    ],
)
def test_an_xml_put_that_is_refused_stores_nothing(
    http: requests.Session,
    endpoint: str,
    bucket: storage.Bucket,
    headers: dict[str, str],
    code: str,
    store: ObjectStore,
) -> None:
    before = payloads(store)
    answer = http.put(f"{endpoint}/{bucket.name}/x", data=bytes(3 << 20), headers=headers)
    assert ElementTree.fromstring(answer.text).findtext("Code") == code
    assert http.head(f"{endpoint}/{bucket.name}/x").status_code == 404
    assert payloads(store) == before


def test_an_xml_put_says_what_it_stored(
    http: requests.Session, endpoint: str, bucket: storage.Bucket
) -> None:
    data = b"data"
    crc32c = base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    md5 = hashlib.md5(data)
    headers = {
        "x-goog-hash": f"crc32c={crc32c}",
        "content-md5": base64.b64encode(md5.digest()).decode(),
        "x-goog-meta-k": "v",
    }
    url = f"{endpoint}/{bucket.name}/" + quote("a//../ü", safe="/.")
    prepared = requests.Request("PUT", url, data=data, headers=headers).prepare()
    prepared.url = url  # requests would resolve the dots
    written = http.send(prepared)
    assert written.headers["x-goog-hash"] == f"crc32c={crc32c},md5={headers['content-md5']}"
    assert written.headers["etag"] == f'"{md5.hexdigest()}"'
    assert bucket.blob("x").exists() is False
    found = next(iter(bucket.list_blobs()))
    assert (found.name, str(found.generation), found.metadata) == (
        "a//../ü",
        written.headers["x-goog-generation"],
        {"k": "v"},
    )


def test_a_resumable_upload_goes_on_where_it_broke_off(
    http: requests.Session, upload: str, objects: str
) -> None:
    data = os.urandom(3 * CHUNK)
    session = begin(http, upload)
    assert http.put(session, headers={"content-range": "bytes */*"}).status_code == 308
    first = http.put(session, data=data[:CHUNK], headers={"content-range": f"bytes 0-{CHUNK - 1}/*"})
    assert (first.status_code, first.headers["range"]) == (308, f"bytes=0-{CHUNK - 1}")
    gap = http.put(
        session, data=data[-CHUNK:], headers={"content-range": f"bytes {2 * CHUNK}-{3 * CHUNK - 1}/*"}
    )
    assert (gap.status_code, gap.json()["error"]["code"]) == (400, 400)
    again = http.put(session, data=data, headers={"content-range": f"bytes 0-{len(data) - 1}/{len(data)}"})
    assert again.json()["size"] == str(len(data))
    status = http.put(session, headers={"content-range": f"bytes */{len(data)}"})
    assert (status.status_code, status.json()["generation"]) == (200, again.json()["generation"])
    assert http.get(f"{objects}/x", params={"alt": "media"}).content == data


def test_bytes_that_came_before_the_connection_broke_are_kept(
    http: requests.Session, upload: str, objects: str
) -> None:
    data = os.urandom(4 * CHUNK)
    session = begin(http, upload)
    url = urlsplit(session)
    with socket.create_connection((url.hostname or "", url.port or 0)) as connection:
        head = (
            f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(data)}\r\n"
            f"Content-Range: bytes 0-{len(data) - 1}/{len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data[: 2 * CHUNK])
    status = http.put(session, headers={"content-range": "bytes */*"})
    assert status.status_code == 308
    stored = int(status.headers.get("range", "bytes=0--1").removeprefix("bytes=0-")) + 1
    assert stored <= 2 * CHUNK
    rest = {"content-range": f"bytes {stored}-{len(data) - 1}/{len(data)}"}
    assert http.put(session, data=data[stored:], headers=rest).status_code == 200
    assert http.get(f"{objects}/x", params={"alt": "media"}).content == data


def test_a_client_may_send_chunks_with_post_and_multipart_with_bare_line_feeds(
    http: requests.Session, upload: str, objects: str
) -> None:
    session = begin(http, upload)
    assert http.post(session, data=b"abc", headers={"content-range": "bytes 0-2/3"}).status_code == 200
    payload = b"ends in a carriage return\r"
    head = b'--==0==\nContent-Type: application/json\n\n{"name": "lf"}\n--==0==\nContent-Type: text/x\n\n'
    answer = http.post(
        upload,
        params={"uploadType": "multipart"},
        data=head + payload + b"\n--==0==--",
        headers={"content-type": 'multipart/related; boundary="==0=="'},
    )
    assert answer.json()["contentType"] == "text/x"
    assert http.get(f"{objects}/lf", params={"alt": "media"}).content == payload


@pytest.mark.parametrize("size", [0, 1, 70_000, (1 << 20) + 1])
def test_a_multipart_payload_may_hold_all_but_its_boundary(
    http: requests.Session, upload: str, objects: str, size: int
) -> None:
    payload = (b"\r\n--boundar\r\n--\r\n" * (size // 17 + 1))[:size]
    head = b'--boundary\r\n\r\n{"name": "x"}\r\n--boundary\r\n\r\n'
    pieces = io.BytesIO(head + payload + b"\r\n--boundary--\r\n")
    answer = http.post(
        upload,
        params={"uploadType": "multipart"},
        data=iter(lambda: pieces.read(977), b""),
        headers={"content-type": "multipart/related; boundary=boundary"},
    )
    assert answer.json()["size"] == str(size)
    assert http.get(f"{objects}/x", params={"alt": "media"}).content == payload


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\n\r\n{}",
        b"--b\r\n\r\n{}\r\n--b\r\n\r\ndata",
        b"--b\r\n\r\n{}\r\n--b\r\n\r\n1\r\n--b\r\n\r\n2\r\n--b--",
        b"data",
    ],
)
def test_a_broken_multipart_body_stores_nothing(
    http: requests.Session, upload: str, bucket: storage.Bucket, body: bytes, store: ObjectStore
) -> None:
    before = payloads(store)
    headers = {"content-type": "multipart/related; boundary=b"}
    answer = http.post(upload, params={"uploadType": "multipart", "name": "x"}, data=body, headers=headers)
    assert answer.status_code == 400
    assert (list(bucket.list_blobs()), payloads(store)) == ([], before)


@pytest.mark.parametrize(
    ("headers", "size"),
    [
        ({"content-range": "bytes 0-9/20"}, 10),  # not the last and no multiple of 256 KiB
        ({"content-range": "bytes 0-9/5"}, 10),
        ({"content-range": "bytes 0-4/10"}, 10),
        ({"content-range": "first ten"}, 10),
        ({"content-range": "bytes 0-9/10", "x-goog-hash": "crc32c=AAAAAA=="}, 10),
    ],
)
def test_a_chunk_that_contradicts_itself_is_refused(
    http: requests.Session, upload: str, objects: str, headers: dict[str, str], size: int
) -> None:
    session = begin(http, upload)
    assert http.put(session, data=b"x" * size, headers=headers).status_code == 400
    assert http.get(f"{objects}/x").status_code == 404


def test_a_cancelled_or_unknown_session_is_gone(
    http: requests.Session, upload: str, store: ObjectStore
) -> None:
    before = payloads(store)
    session = begin(http, upload)
    assert http.delete(session).status_code == 499
    assert http.put(session, data=b"x").status_code == 404
    assert payloads(store) == before


def test_a_range_that_cannot_be_served_says_why(
    http: requests.Session, objects: str, bucket: storage.Bucket
) -> None:
    bucket.blob("x").upload_from_string(b"0123456789")
    for value, status in (("bytes=10-", 416), ("bytes=5-2", 400), ("bytes=0-1,4-5", 501), ("lines=1-2", 501)):
        answer = http.get(f"{objects}/x", params={"alt": "media"}, headers={"range": value})
        assert answer.status_code == status
        assert answer.headers.get("content-range") == ("bytes */10" if status == 416 else None)


def test_inputs_that_would_be_ignored_are_refused_by_name(
    http: requests.Session, endpoint: str, objects: str, bucket: storage.Bucket
) -> None:
    bucket.blob("x").upload_from_string(b"data")
    generation = {"generation": "1.5"}
    for method, url, arguments, status, named in (
        ("GET", objects, {"params": {"filter": "contexts"}}, 501, "filter"),
        ("GET", f"{objects}/x", {"params": generation}, 400, "generation"),
        ("GET", f"{objects}/x", {"headers": {"if-modified-since": "now"}}, 501, "if-modified-since"),
        ("PATCH", f"{objects}/x", {"json": {"acl": [{"entity": "allUsers"}]}}, 501, "acl"),
        ("PATCH", f"{objects}/x", {"json": {"metadata": {"k": 1}}}, 400, "metadata"),
        (
            "POST",
            f"{objects}/y/compose",
            {"json": {"sourceObjects": [], "deleteSourceObjects": True}},
            501,
            "deleteSource",
        ),
        ("POST", f"{objects}/x/moveTo/o/y", {}, 501, "moveTo"),
        ("GET", f"{endpoint}/storage/v1/b/{bucket.name}/acl", {}, 501, "acl"),
        ("POST", f"{endpoint}/batch/storage/v1", {"data": b"none"}, 400, "batch"),
    ):
        answer = http.request(method, url, **arguments)  # type: ignore[arg-type]  # a table of keyword arguments
        assert (answer.status_code, named in answer.json()["error"]["message"]) == (status, True), answer.text


def test_gzip_content_is_served_as_it_is_stored(
    http: requests.Session, objects: str, bucket: storage.Bucket
) -> None:
    blob = bucket.blob("x")
    blob.content_encoding = "gzip"
    blob.upload_from_string(b"not really compressed")
    plain = {"accept-encoding": "identity"}
    assert http.get(f"{objects}/x", params={"alt": "media"}, headers=plain).status_code == 501
    packed = http.get(
        f"{objects}/x", params={"alt": "media"}, stream=True, headers={"accept-encoding": "gzip"}
    )
    assert (packed.headers["content-encoding"], packed.raw.read()) == ("gzip", b"not really compressed")


def test_a_bucket_tells_its_layout(http: requests.Session, endpoint: str, bucket: storage.Bucket) -> None:
    layout = http.get(f"{endpoint}/storage/v1/b/{bucket.name}/storageLayout").json()
    assert (layout["bucket"], layout["hierarchicalNamespace"]) == (bucket.name, {"enabled": False})


def test_not_modified_has_no_body(
    http: requests.Session, endpoint: str, objects: str, bucket: storage.Bucket
) -> None:
    blob = bucket.blob("x")
    blob.upload_from_string(b"data")
    unwanted = {"if-none-match": blob.etag}
    xml = f"{endpoint}/{bucket.name}/x"
    for url, headers in (
        (f"{objects}/x", unwanted),
        (f"{objects}/x?alt=media", unwanted),
        (xml, {"if-none-match": http.head(xml).headers["etag"]}),
    ):
        answer = http.get(url, headers=headers)
        assert (answer.status_code, answer.headers.get("content-length", "0")) == (304, "0")
