"""One running CustomJob: its replicas as processes, from the first start to the final state."""

from __future__ import annotations

import logging
import queue
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from google.cloud.aiplatform_v1.types import CustomJobSpec

from penstock_local.faults.board import JobFaults
from penstock_local.jobs import package_start
from penstock_local.jobs.addresses import AddressBlock, allocate
from penstock_local.jobs.devices import divide, visible_devices
from penstock_local.jobs.images import ImageMap, LocalImage
from penstock_local.jobs.processes import ManagedProcess, ProcessRecord, base_environment
from penstock_local.jobs.replicas import Replica, replica_environment, replicas_of
from penstock_local.jobs.restarts import Action, RestartPolicy
from penstock_local.logs import LogStore
from penstock_local.storage import ObjectStore
from penstock_local.storage.errors import StorageError

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30.0
"""Between SIGTERM and SIGKILL. What Vertex gives is not documented; Kubernetes' default is 30 s."""
_LAST_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How a job ended."""

    succeeded: bool = False
    cancelled: bool = False
    timed_out: bool = False
    error: str = ""


class JobListener(Protocol):
    """Told when the job's replicas run; the outcome is the return value of `CustomJobRun.run`."""

    def running(self) -> None:
        """All replicas have been started, for the first time or again."""


@dataclass(frozen=True, slots=True)
class _Exit:
    replica: Replica
    process: ManagedProcess
    code: int


class _Cancel:
    """Put into the queue to end the job."""


@dataclass(frozen=True, slots=True)
class _Restart:
    """Put into the queue to end all replicas and start them again, as a fault would."""

    notice_seconds: float
    meanwhile: Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _LateStart:
    """Put into the queue when a replica that was held back is to start."""

    replica: Replica


_Event = _Exit | _Cancel | _Restart | _LateStart


@dataclass(kw_only=True)
class CustomJobRun:
    """Runs one job. `run` blocks; `cancel` and `signal_replica` may come from any thread."""

    job_id: str
    spec: CustomJobSpec
    images: ImageMap
    logs: LogStore
    record: ProcessRecord
    objects: ObjectStore
    client_environment: Mapping[str, str]
    project_number: int
    work_dir: Path
    faults: JobFaults
    _devices_of: dict[str, str] = field(default_factory=dict)
    _events: queue.Queue[_Event] = field(default_factory=queue.Queue)
    _processes: dict[str, ManagedProcess] = field(default_factory=dict)
    _waiters: list[threading.Thread] = field(default_factory=list)
    _late: dict[str, tuple[_LateStart, threading.Timer]] = field(default_factory=dict)
    """Replicas that are held back."""
    _preempted: set[str] = field(default_factory=set)
    """Replicas whose node is being taken away."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, listener: JobListener) -> JobOutcome:
        """Start every replica and follow them to the end. No process of the job is left when this returns."""
        replicas = replicas_of(self.spec)
        addresses = allocate(len(replicas))
        try:
            self._share_devices(replicas)
            self.faults.begin(self)
            self._start_all(replicas, addresses)
            listener.running()
            return self._follow(replicas, addresses)
        except (OSError, StorageError) as exc:
            return JobOutcome(error=f"a replica could not be started: {exc}")
        finally:
            self.faults.end()
            self._stop_all()
            addresses.release()

    def cancel(self) -> None:
        """Ask the job to end; `run` returns when its replicas are gone."""
        self._events.put(_Cancel())

    def signal_replica(self, name: str, number: int) -> bool:
        """Send a signal to a replica, as a fault would; False when it is not running."""
        with self._lock:
            process = self._processes.get(name)
        if process is None or not process.signal(number):
            return False
        self._log(name, "NOTICE", f"fault injected: {signal.Signals(number).name}")
        return True

    def running(self, replica: str) -> Mapping[str, ManagedProcess]:
        """See faults.board.Victim."""
        with self._lock:
            return {name: one for name, one in self._processes.items() if replica in ("", name)}

    def preempt(self, replica: str, notice_seconds: float) -> bool:
        """See faults.board.Victim. What the replica has on its disk goes with it."""
        with self._lock:
            process = self._processes.get(replica)
            if process is not None:
                self._preempted.add(replica)
        if process is None:
            return False
        process.stop(notice_seconds) if notice_seconds else process.vanish()
        return True

    def restart(self, notice_seconds: float, meanwhile: Callable[[], None]) -> None:
        """See faults.board.Victim."""
        self._events.put(_Restart(notice_seconds, meanwhile))

    def tell(self, replica: str, line: str) -> None:
        """See faults.board.Victim."""
        self._log(replica or replicas_of(self.spec)[0].name, "NOTICE", line)

    def _follow(self, replicas: Sequence[Replica], addresses: AddressBlock) -> JobOutcome:
        scheduling = self.spec.scheduling
        policy = RestartPolicy(
            restart_job_on_worker_restart=scheduling.restart_job_on_worker_restart,
            disable_retries=scheduling.disable_retries,
        )
        deadline = time.monotonic() + scheduling.timeout.total_seconds() if scheduling.timeout else None
        while True:
            event = self._next_event(deadline)
            if event is None:
                return JobOutcome(
                    timed_out=True, error=f"the job ran longer than its timeout of {scheduling.timeout}"
                )
            if isinstance(event, _Cancel):
                return JobOutcome(cancelled=True)
            if isinstance(event, _Restart):
                self._stop_all(event.notice_seconds)
                event.meanwhile()
                self._start_all(replicas, addresses)
                continue
            if isinstance(event, _LateStart):
                if self._late.pop(event.replica.name, (None,))[0] is event:
                    self._start_now(event.replica, replicas, addresses)
                continue
            if self._processes.get(event.replica.name) is not event.process:
                continue  # the end of a process that was stopped on purpose
            replica = event.replica
            action = self._action_after(event, policy)
            if action is Action.SUCCEED:
                return JobOutcome(succeeded=True)
            if action is Action.FAIL:
                return JobOutcome(error=self._failure(replica, event.code))
            if action is Action.RESTART_REPLICA:
                self._announce(replica, event.code, f"{replica.name} restarts")
                self._start(replica, replicas, addresses)
            elif action is Action.RESTART_JOB:
                self._announce(replica, event.code, "the whole job restarts")
                self._stop_all()
                self._start_all(replicas, addresses)

    def _action_after(self, event: _Exit, policy: RestartPolicy) -> Action:
        replica = event.replica
        if self._preempted and event.code:
            for name in self._preempted:
                shutil.rmtree(self.work_dir / name, ignore_errors=True)
            self._log(
                replica.name, "WARNING", f"the node of {', '.join(sorted(self._preempted))} was preempted"
            )
            self._preempted.clear()
            return policy.preempted()
        return policy.decide(replica=replica.name, is_primary=replica.is_primary, exit_code=event.code)

    def _next_event(self, deadline: float | None) -> _Event | None:
        try:
            return self._events.get(
                timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
            )
        except queue.Empty:
            return None

    def _share_devices(self, replicas: Sequence[Replica]) -> None:
        wanted = [replica.accelerator_count for replica in replicas]
        devices = visible_devices() if any(wanted) else ()
        shares = divide(devices, wanted)
        if shares is None:  # rather none than one for two ranks
            line = f"the job asks for {sum(wanted)} accelerators and {len(devices)} are here; its replicas get none"
            self._log(replicas[0].name, "NOTICE", line)
        for replica, share in zip(replicas, shares or [()] * len(replicas), strict=True):
            self._devices_of[replica.name] = ",".join(share)

    def _start_all(self, replicas: Sequence[Replica], addresses: AddressBlock) -> None:
        for replica in replicas:
            self._start(replica, replicas, addresses)

    def _start(self, replica: Replica, replicas: Sequence[Replica], addresses: AddressBlock) -> None:
        """Now, or later where a fault holds the replica back."""
        seconds = self.faults.delay_of(replica.name)
        if not seconds:
            self._start_now(replica, replicas, addresses)
            return
        event = _LateStart(replica)
        timer = threading.Timer(seconds, self._events.put, (event,))
        timer.daemon = True
        self._late[replica.name] = (event, timer)
        timer.start()

    def _start_now(self, replica: Replica, replicas: Sequence[Replica], addresses: AddressBlock) -> None:
        image = self.images.resolve(replica.image)
        directory = self.work_dir / replica.name  # containers share no file system
        directory.mkdir(parents=True, exist_ok=True)
        environment = {
            **base_environment(image.python),
            **self.client_environment,
            **image.env,
            **replica_environment(
                replica,
                replicas,
                addresses,
                spec=self.spec,
                job_id=self.job_id,
                project_number=self.project_number,
            ),
            "CUDA_VISIBLE_DEVICES": self._devices_of[replica.name],
            **dict(replica.env),
        }
        process = ManagedProcess(
            self._command_line(replica, image, directory),
            env=environment,
            cwd=directory,
            sink=lambda severity, line: self._heard(replica.name, severity, line),
            record=self.record,
        )
        with self._lock:
            self._processes[replica.name] = process
        waiter = threading.Thread(target=self._await, args=(replica, process), daemon=True)
        self._waiters.append(waiter)
        waiter.start()

    def _command_line(self, replica: Replica, image: LocalImage, directory: Path) -> tuple[str, ...]:
        """The program of a replica. Brings the packages of one that runs a Python module; raises StorageError."""
        if not replica.python_module:
            return image.command_line(replica.command, replica.args)
        packages = []
        for index, uri in enumerate(replica.package_uris):
            bucket, _, name = uri.removeprefix("gs://").partition("/")
            packages.append(directory / "packages" / str(index) / Path(name).name)
            packages[-1].parent.mkdir(parents=True, exist_ok=True)
            packages[-1].write_bytes(self.objects.read(bucket, name))
        installed = str(directory / "packages" / "installed")
        started = (str(image.python), package_start.__file__, installed, replica.python_module)
        return (*started, *map(str, packages), "--", *replica.args)

    def _await(self, replica: Replica, process: ManagedProcess) -> None:
        self._events.put(_Exit(replica, process, process.wait()))

    def _stop_all(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """SIGTERM to all at once, so that replicas which save together can; then no process is left and no line unread.

        Without any grace there is no SIGTERM either.
        """
        for _, timer in self._late.values():
            timer.cancel()
        self._late.clear()
        with self._lock:
            processes = list(self._processes.values())
            self._processes.clear()
        stoppers = [
            threading.Thread(target=process.stop, args=(grace_seconds,))
            if grace_seconds
            else threading.Thread(target=process.vanish)
            for process in processes
        ]
        for stopper in stoppers:
            stopper.start()
        for thread in (*stoppers, *self._waiters):
            thread.join()
        self._waiters.clear()

    def _failure(self, replica: Replica, code: int) -> str:
        lines = self.logs.last_lines(job_id=self.job_id, task_name=replica.name, count=_LAST_LINES)
        told = "\n".join(f"  {line}" for line in lines)
        return f"The replica {replica.name} exited with a non-zero status of {code}. Its last lines:\n{told}"

    def _announce(self, replica: Replica, code: int, consequence: str) -> None:
        self._log(replica.name, "WARNING", f"{replica.name} ended with status {code}; {consequence}")

    def _heard(self, replica_name: str, severity: str, line: str) -> None:
        """First kept, then acted on: whoever reads what a fault did finds the line that brought it on before it."""
        self._log(replica_name, severity, line)
        self.faults.saw(line)

    def _log(self, replica_name: str, severity: str, line: str) -> None:
        self.logs.append(job_id=self.job_id, task_name=replica_name, severity=severity, line=line)
