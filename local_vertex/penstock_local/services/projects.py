"""google.cloud.resourcemanager.v3.Projects, as far as the SDK asks: which number has the project?"""

from __future__ import annotations

from google.cloud.resourcemanager_v3.types import GetProjectRequest, Project

from penstock_local.api.dispatch import CallContext
from penstock_local.api.errors import NotFoundError
from penstock_local.services.names import Place


class Projects:
    """The one project."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def get_project(self, request: GetProjectRequest, _: CallContext) -> Project:
        """The project by id or number."""
        wanted = request.name.removeprefix("projects/")
        if wanted not in (self._place.project_id, str(self._place.project_number)):
            raise NotFoundError(
                f"project {wanted!r} does not exist; this stand-in serves {self._place.project_id!r}."
            )
        return Project(
            name=f"projects/{self._place.project_number}",
            project_id=self._place.project_id,
            display_name=self._place.project_id,
            state=Project.State.ACTIVE,
        )
