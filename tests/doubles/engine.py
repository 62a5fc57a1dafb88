"""Minimal doubles of the engine's parts that the plugin hooks.

They have the shapes of vLLM 0.32.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Status(enum.IntEnum):
    RUNNING = 5
    FINISHED_STOPPED = 7
    FINISHED_ERROR = 11


@dataclass
class Request:
    request_id: str
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    arrival_time: float = 1.8e9
    num_prompt_tokens: int = 96
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    status: Status = Status.RUNNING
    abort_immediately: bool = False
    prefill_stats: Any = None


class Blocks:
    def __init__(self, *groups: list[int]) -> None:
        self.groups = groups

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return self.groups


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any: ...


class Base:
    """``KVConnectorBase_V1``: the defaults call each other as the real ones do."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self.role = role
        self._connector_metadata: Any = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None

    def on_new_request(self, request: Any) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return SimpleNamespace()

    def update_connector_output(self, connector_output: Any) -> None: ...

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def shutdown(self) -> str:
        return "shut"

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return set(), set()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sending, receiving = self.get_finished(finished_req_ids)
        return SimpleNamespace(finished_sending=sending, finished_recving=receiving, failed_recving=set())


class Pull(Base, SupportsHMA):
    """A leaf connector that keeps blocks for a peer and loads asynchronously."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.done: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 96 - num_computed_tokens, True

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        done, self.done = self.done, set()
        return set(), done

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if not request.kv_transfer_params:
            return False, None
        params = {"remote_block_ids": block_ids, "remote_num_tokens": 96, "transfer_mode": "pull"}
        return True, params


class MultiConnector(Base):
    """A composite connector, as vLLM's ``MultiConnector``."""


class Factory:
    classes: Mapping[str, type] = {"Pull": Pull, "MultiConnector": MultiConnector}

    @classmethod
    def get_connector_class(cls, name: str) -> type:
        return cls.classes[name]


class Scheduler:
    """A scheduler that schedules and finishes exactly the requests that a test names."""

    def __init__(self, vllm_config: Any = None) -> None:
        self.vllm_config = vllm_config
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.next = output()

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def schedule(self) -> Any:
        return self.next

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> dict[int, Any]:
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            request.num_output_tokens += request_id in model_output.tokens
            if request_id in model_output.ends:
                request.status = Status.FINISHED_STOPPED
                self._free_request(request)
        return {0: "outputs"}

    def shutdown(self) -> str:
        return "shut"

    def _free_request(self, request: Request) -> str:
        del self.requests[request.request_id]
        return "freed"


def output(new: tuple[str, ...] = (), preempted: tuple[str, ...] = (), **tokens: int) -> Any:
    """Build a ``SchedulerOutput``; ``tokens``: scheduled tokens by request."""
    return step_of(tokens, new, preempted)


def step_of(tokens: Mapping[str, int], new: tuple[str, ...] = (), preempted: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        num_scheduled_tokens=dict(tokens),
        total_num_scheduled_tokens=sum(tokens.values()),
        preempted_req_ids=set(preempted),
        finished_req_ids=set(),
    )


def model_output(tokens: tuple[str, ...] = (), ends: tuple[str, ...] = (), landed: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(tokens=tokens, ends=ends, kv_connector_output=SimpleNamespace(finished_recving=set(landed)))


@dataclass
class Config:
    """A ``VllmConfig``."""

    kv_transfer_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            engine_id="E", kv_role="kv_both", kv_load_failure_policy="fail", kv_connector="Pull", kv_connector_extra_config={}
        )
    )
    model_config: Any = field(default_factory=lambda: SimpleNamespace(model="m", revision="r1", dtype="torch.bfloat16"))
    cache_config: Any = field(default_factory=lambda: SimpleNamespace(cache_dtype="auto", block_size=32, num_gpu_blocks=100))
    parallel_config: Any = field(
        default_factory=lambda: SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_rank=0, rank=1)
    )


def cache_config(*layers: int, page_bytes: int = 1000) -> Any:
    """Build a ``KVCacheConfig`` with one group for each number of layers."""
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(page_size_bytes=page_bytes), layer_names=["l"] * count) for count in layers
    ]
    return SimpleNamespace(kv_cache_groups=groups)


def modules() -> tuple[ModuleType, ModuleType]:
    """Build the two modules that the plugin waits for, with fresh classes."""
    factory, scheduler = ModuleType("factory"), ModuleType("scheduler")
    factory.KVConnectorFactory = type("KVConnectorFactory", (Factory,), {})  # type: ignore[attr-defined]
    factory.KVConnectorFactory.get_connector_class = classmethod(Factory.get_connector_class.__func__)  # type: ignore[attr-defined]
    scheduler.Scheduler = type("Scheduler", (Scheduler,), {"__init__": Scheduler.__init__})  # type: ignore[attr-defined]
    return factory, scheduler
