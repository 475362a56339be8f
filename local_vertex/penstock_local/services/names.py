"""Resource names: what is in them, and what they may be."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock_local.api.errors import InvalidArgumentError

_PARENT = re.compile(r"projects/([^/]+)/locations/([^/]+)")
_JOB_ID = re.compile(r"[a-z][-a-z0-9]{0,127}")


@dataclass(frozen=True, slots=True)
class Place:
    """The one project that a stand-in serves. Clients may name it by id or by number; resources carry the number."""

    project_id: str
    project_number: int

    @property
    def project_names(self) -> tuple[str, str]:
        """`projects/ID` and `projects/NUMBER`."""
        return f"projects/{self.project_id}", f"projects/{self.project_number}"

    def parent(self, given: str) -> str:
        """`projects/NUMBER/locations/LOCATION` for a request's parent. Raises InvalidArgumentError."""
        match = _PARENT.fullmatch(given)
        if match is None or match[1] not in (self.project_id, str(self.project_number)):
            raise InvalidArgumentError(
                f"parent {given!r} is not served here; it must be projects/{self.project_id}/locations/LOCATION."
            )
        return f"projects/{self.project_number}/locations/{match[2]}"

    def name(self, given: str) -> str:
        """A resource name with the project spelled as its number. Raises InvalidArgumentError."""
        head, separator, rest = given.partition("/locations/")
        location, _, tail = rest.partition("/")
        if not separator or not tail:
            raise InvalidArgumentError(
                f"{given!r} is not a resource name below projects/PROJECT/locations/LOCATION."
            )
        return f"{self.parent(f'{head}/locations/{location}')}/{tail}"


def checked_job_id(job_id: str) -> str:
    """A pipeline job id. Raises InvalidArgumentError unless it is what Vertex takes."""
    if _JOB_ID.fullmatch(job_id) is None:
        raise InvalidArgumentError(
            f"pipeline_job_id {job_id!r} is not valid: lower-case letters, digits and hyphens, at most 128 characters, "
            "beginning with a letter."
        )
    return job_id
