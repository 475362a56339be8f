"""What follows the end of a replica: the documented restart rules of Vertex as one pure decision.

    primary exits 0                          the job has succeeded; the other replicas are stopped
    another replica exits 0                  nothing
    exit 134 or 139 (SIGABRT, SIGSEGV), 6, 11   the whole job is retried, up to 3 times
    killed by another signal                 the replica is restarted, up to 5 times, then the whole job is retried;
                                             with restart_job_on_worker_restart the whole job restarts each time
    any other exit code                      permanent: the job has failed
    its Spot VM is taken away                the whole job is restarted, up to 6 times

Exit code 143 (ended by SIGTERM) is treated like another signal. The documentation does not say; that is our choice.
`disable_retries` turns restart_job_on_worker_restart off and retries nothing.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

MAX_REPLICA_RESTARTS = 5
MAX_JOB_RETRIES = 3
MAX_PREEMPTIONS = 6
_RETRY_JOB_CODES = frozenset({6, 11, 134, 139})
_LAST_SIGNAL_CODE = 128 + 64


class Action(enum.Enum):
    """What the job does next."""

    NOTHING = "nothing"
    SUCCEED = "succeed"
    RESTART_REPLICA = "restart replica"
    RESTART_JOB = "restart job"
    FAIL = "fail"


@dataclass(slots=True)
class RestartPolicy:
    """Decides with the counts of one job; make one for each."""

    restart_job_on_worker_restart: bool
    disable_retries: bool
    _replica_restarts: Counter[str] = field(default_factory=Counter)
    _job_retries: int = 0
    _preemptions: int = 0

    def decide(self, *, replica: str, is_primary: bool, exit_code: int) -> Action:
        """The action for one ended replica. Counts it."""
        if exit_code == 0:
            return Action.SUCCEED if is_primary else Action.NOTHING
        if not is_transient(exit_code) or self.disable_retries:
            return Action.FAIL
        if exit_code in _RETRY_JOB_CODES:
            return self._retry_job()
        self._replica_restarts[replica] += 1
        if self._replica_restarts[replica] > MAX_REPLICA_RESTARTS:
            return self._retry_job()
        return Action.RESTART_JOB if self.restart_job_on_worker_restart else Action.RESTART_REPLICA

    def preempted(self) -> Action:
        """The action when the node of a replica was taken away, whatever its processes ended with. Counts it."""
        self._preemptions += 1
        may_restart = self._preemptions <= MAX_PREEMPTIONS and not self.disable_retries
        return Action.RESTART_JOB if may_restart else Action.FAIL

    def _retry_job(self) -> Action:
        self._job_retries += 1
        self._replica_restarts.clear()
        return Action.RESTART_JOB if self._job_retries <= MAX_JOB_RETRIES else Action.FAIL


def is_transient(exit_code: int) -> bool:
    """Whether an exit code may be the platform's fault rather than the program's."""
    return exit_code in _RETRY_JOB_CODES or 128 < exit_code <= _LAST_SIGNAL_CODE
