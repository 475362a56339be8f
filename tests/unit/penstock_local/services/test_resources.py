from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.cloud.aiplatform_v1.types import CustomJob, Model, job_service, pipeline_service

from penstock_local.api.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from penstock_local.services.resources import ResourceStore, list_page


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ResourceStore]:
    store = ResourceStore(tmp_path / "resources.sqlite")
    yield store
    store.close()


def job(name: str, **fields: object) -> CustomJob:
    return CustomJob(name=name, **fields)


def names(messages: object) -> list[str]:
    return [message.name for message in messages]  # type: ignore[attr-defined]  # any resources


def test_resources_outlive_the_store_and_ids_go_on_rising(tmp_path: Path) -> None:
    first = ResourceStore(tmp_path / "db")
    ids = [first.next_id() for _ in range(3)]
    first.insert(job("a/1", display_name="kept"), parent="a")
    first.put_text("k", "v")
    first.close()
    second = ResourceStore(tmp_path / "db")
    ids += [second.next_id() for _ in range(3)]
    assert ids == sorted(set(ids), key=int)
    assert {len(number) for number in ids} == {19}
    assert second.get(CustomJob, "a/1").display_name == "kept"
    assert (second.get_text("k"), second.get_text("other")) == ("v", None)
    second.close()


def test_a_name_is_taken_once_and_can_be_taken_again_after_a_delete(store: ResourceStore) -> None:
    store.insert(job("a/1"), parent="a")
    with pytest.raises(AlreadyExistsError, match="a/1 already exists"):
        store.insert(job("a/1"), parent="a")
    store.delete(CustomJob, "a/1")
    store.insert(job("a/1"), parent="a")


@pytest.mark.parametrize("operation", ["get", "update", "delete"])
def test_what_does_not_exist_or_is_of_another_type_is_not_found(store: ResourceStore, operation: str) -> None:
    store.insert(job("a/1"), parent="a")
    arguments = [lambda _: None] if operation == "update" else []
    for message_type, name in ((CustomJob, "a/2"), (Model, "a/1")):
        with pytest.raises(NotFoundError, match=f"{message_type.__name__} {name} does not exist"):
            getattr(store, operation)(message_type, name, *arguments)


def test_resources_are_told_oldest_first_by_type_and_parent(store: ResourceStore) -> None:
    for name in ("b/2", "a/1", "b/1"):
        store.insert(job(name), parent=name[0])
    store.insert(Model(name="b/m"), parent="b")
    assert names(store.all(CustomJob)) == ["b/2", "a/1", "b/1"]
    assert names(store.all(CustomJob, "b")) == ["b/2", "b/1"]


def test_an_update_that_raises_changes_nothing(store: ResourceStore) -> None:
    store.insert(job("a/1", display_name="before"), parent="a")

    def change(message: CustomJob) -> None:
        message.display_name = "after"
        raise InvalidArgumentError("no")

    with pytest.raises(InvalidArgumentError):
        store.update(CustomJob, "a/1", change)
    assert store.get(CustomJob, "a/1").display_name == "before"


def test_who_waits_is_woken_by_the_change(store: ResourceStore) -> None:
    store.insert(job("a/1"), parent="a")

    def rename(message: CustomJob) -> None:
        message.display_name = "done"

    changer = threading.Timer(0.2, lambda: store.update(CustomJob, "a/1", rename))
    changer.start()
    asked = time.monotonic()
    found = store.wait_for(CustomJob, "a/1", lambda message: bool(message.display_name), 30)
    assert found.display_name == "done"
    assert time.monotonic() - asked < 5
    changer.join()


def test_who_waits_in_vain_gets_the_resource_as_it_is(store: ResourceStore) -> None:
    store.insert(job("a/1"), parent="a")
    assert store.wait_for(CustomJob, "a/1", lambda _: False, 0.05).name == "a/1"


def test_who_waits_for_what_is_deleted_is_told(store: ResourceStore) -> None:
    store.insert(job("a/1"), parent="a")
    deleter = threading.Timer(0.1, lambda: store.delete(CustomJob, "a/1"))
    deleter.start()
    with pytest.raises(NotFoundError):
        store.wait_for(CustomJob, "a/1", lambda _: False, 30)
    deleter.join()


JOBS = [job(f"j{number}", display_name="even" if number % 2 == 0 else "odd") for number in range(5)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["j4", "j3", "j2", "j1", "j0"]),
        ({"filter": "display_name=odd"}, ["j3", "j1"]),
        ({"page_size": 2}, ["j4", "j3"]),
        ({"page_size": 2, "page_token": "4"}, ["j0"]),
    ],
)
def test_a_page_is_filtered_and_newest_first(query: dict[str, object], expected: list[str]) -> None:
    assert names(list_page(JOBS, job_service.ListCustomJobsRequest(**query))[0]) == expected


@pytest.mark.parametrize(
    ("order_by", "expected"),
    [
        ("create_time", "j0"),
        ("create_time asc", "j0"),
        ("createTime desc", "j4"),
        ("create_time desc", "j4"),
        ("", "j4"),
    ],
)
def test_a_page_is_in_the_order_asked_for(order_by: str, expected: str) -> None:
    request = pipeline_service.ListPipelineJobsRequest(order_by=order_by)  # ListCustomJobs has no order
    assert names(list_page(JOBS, request)[0])[0] == expected


def test_pages_follow_one_another_to_the_end_without_an_empty_one() -> None:
    token, pages = "", []
    while True:
        page, token = list_page(JOBS[:4], job_service.ListCustomJobsRequest(page_size=2, page_token=token))
        pages.append(names(page))
        if not token:
            break
    assert pages == [["j3", "j2"], ["j1", "j0"]]


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"page_token": "x"}, "page_token 'x'"),
        ({"page_token": "-1"}, "page_token '-1'"),
        ({"page_size": -1}, "page_size is -1"),
        ({"filter": "="}, "filter '='"),
    ],
)
def test_a_list_request_that_makes_no_sense_is_invalid(query: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        list_page(JOBS, job_service.ListCustomJobsRequest(**query))


def test_an_order_that_is_not_kept_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="order_by 'display_name'"):
        list_page(JOBS, pipeline_service.ListPipelineJobsRequest(order_by="display_name"))
