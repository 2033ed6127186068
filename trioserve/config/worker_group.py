"""The options of an engine's workers: how many, where, and which one gets a request."""

from __future__ import annotations

import itertools
from typing import cast, get_args

import attrs

from trioserve.config.model import ModelOptions
from trioserve.config.options import option
from trioserve.protocol.devices import CPU_OR_GPU
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.joining import WorkerRole

EXECUTOR_BACKENDS = ("mp", "ray")
HOST_AND_PORT = r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]]+):\d{1,5}"
"""Pattern of an address with a port; an IPv6 address is in brackets."""
WORKER_ROLES: tuple[WorkerRole, ...] = get_args(WorkerRole)
ROUTING_POLICIES = ("predicted", "round_robin", "least_loaded", "prefix")


@attrs.frozen(kw_only=True)
class WorkerGroupOptions(ModelOptions):
    """Options of a model's workers together; those of each are the engine's."""

    data_parallel_size: int = option(
        1,
        "workers, each with the whole model: on GPUs one each, on a CPU with a share of the cores; "
        "0 for workers of other hosts only",
        group="worker",
        page="workers#Several workers",
        common=True,
        kind=int,
        low=0,
        high=1024,
    )
    tensor_parallel_size: int = option(
        1,
        "processes of each worker, which have a part of every layer each; on GPUs one each",
        group="worker",
        page="tensor-parallel#Tensor parallel",
        kind=int,
        low=1,
        high=1024,
    )
    tensor_parallel_slices: int | None = option(
        None,
        "parts of each sum that is made of all processes' results, on a CPU: as many give the same "
        "bits with any number of processes",
        unset="1 with one process, 4 with several where the model allows it",
        group="worker",
        page="tensor-parallel#The same bits",
        kind=int,
        low=1,
        high=1024,
    )
    pipeline_parallel_size: int = option(
        1,
        "stages of each worker, which have some of the layers each; on GPUs one for each process "
        "of --tensor-parallel-size",
        group="worker",
        page="pipeline-parallel#Pipeline parallel",
        kind=int,
        low=1,
        high=1024,
    )
    pipeline_parallel_layers: str | None = option(
        None,
        "layers of each stage, such as 17,15; the log says what each takes",
        unset="a split by the weights that a step reads",
        group="worker",
        page="pipeline-parallel#How the layers are split",
        metavar="N,N",
        form=(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", "a number for each stage, such as 17,15"),
    )
    enable_expert_parallel: bool = option(
        False,
        "let each process of --tensor-parallel-size have some of the experts of a layer, rather "
        "than a part of each",
        group="worker",
        page="tensor-parallel#Experts",
        kind=bool,
    )
    worker_devices: tuple[str, ...] = option(
        (),
        "device of a worker on this host, given once for each worker in place of "
        "--data-parallel-size",
        unset="a GPU each, or a share of the cores",
        group="worker",
        page="workers#Devices",
        metavar="DEVICE",
        repeatable=True,
        form=CPU_OR_GPU,
    )
    disaggregation: tuple[str, ...] = option(
        (),
        "role of a worker, given once for each: prefill computes prompts, decode goes on with "
        "them, and both, which the others have, does both; or auto, given once, which lets the "
        "workers' loads decide for each request",
        unset="both",
        group="worker",
        page="disaggregation#Prefill and decode apart",
        choices=(*WORKER_ROLES, "auto"),
        repeatable=True,
    )
    distributed_executor_backend: str = option(
        "mp",
        "workers: processes of this host (mp), or actors of Ray (ray, which needs the extra ray)",
        choices=EXECUTOR_BACKENDS,
        group="worker",
        page="workers#Ray",
    )
    nnodes: int = option(
        1,
        "hosts that have the processes of each worker, as many each; for workers of Ray, which "
        "chooses the hosts",
        group="worker",
        page="several-hosts#By Ray",
        kind=int,
        low=1,
        high=1024,
    )
    worker_listen: str | None = option(
        None,
        "address and port for other hosts, where trioserve worker and trioserve front-end join",
        unset="none",
        group="worker",
        page="workers#Other hosts",
        metavar="ADDRESS:PORT",
        form=(HOST_AND_PORT, "ADDRESS:PORT, such as 0.0.0.0:7000"),
    )
    worker_tls: str | None = option(
        None,
        "folder with the engine's certificate and key for other hosts, and their authority's "
        "certificate, which trioserve worker-certificates makes",
        group="worker",
        page="workers#Other hosts",
        metavar="FOLDER",
    )
    worker_link_timeout: float = option(
        5.0,
        "seconds without a sign of life after which a worker or front end of another host counts "
        "as lost",
        group="worker",
        page="workers#Other hosts",
        kind=float,
        low=0.1,
    )
    routing_policy: str = option(
        "predicted",
        "choice of a worker for a request: by the predicted time to the first token, in turn, by "
        "the fewest requests, or by the longest cached prefix",
        choices=ROUTING_POLICIES,
        group="worker",
        page="workers#Routing",
    )
    routing_temperature: float = option(
        0.0,
        "with more than 0, workers that cost more than the best one are chosen now and then",
        group="worker",
        page="workers#Routing",
        kind=float,
        low=0,
    )

    @property
    def num_workers(self) -> int:
        """Number of workers that start with the engine as processes of this host."""
        return 0 if self.uses_ray else len(self.worker_devices) or self.data_parallel_size

    @property
    def uses_ray(self) -> bool:
        """True if the workers are actors of Ray."""
        return self.distributed_executor_backend == "ray"

    @property
    def num_ranks(self) -> int:
        """Number of processes of a worker, which have a part of the model each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def layers_of_stages(self) -> list[int]:
        """Number of layers of each stage; empty if the worker chooses it."""
        return [int(each) for each in (self.pipeline_parallel_layers or "").split(",") if each]

    @property
    def splits_by_load(self) -> bool:
        """True if the workers have no roles, and their loads decide what each computes."""
        return self.disaggregation == ("auto",)

    def role_of(self, index: int) -> WorkerRole:
        """Return the part of each request that the worker of that number computes."""
        roles = () if self.splits_by_load else self.disaggregation
        return cast("WorkerRole", roles[index]) if index < len(roles) else "both"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._check_devices()
        self._check_roles()
        layers = self.layers_of_stages
        if layers and len(layers) != self.pipeline_parallel_size:
            raise InvalidRequest(
                f"pipeline_parallel_layers has numbers for {len(layers)} stages, and "
                f"--pipeline-parallel-size is {self.pipeline_parallel_size}",
                param="pipeline_parallel_layers",
            )
        self._check_nodes()
        if self.uses_ray and self.worker_tls is not None:
            raise InvalidRequest(
                "worker_tls isn't for workers of Ray, whose certificates the engine makes itself",
                param="worker_tls",
            )
        if not self.uses_ray and self.worker_listen is not None and self.worker_tls is None:
            raise InvalidRequest(
                "worker_listen needs certificates for workers of other hosts (--worker-tls)",
                param="worker_listen",
            )
        if self.data_parallel_size == 0 and (self.uses_ray or self.worker_listen is None):
            raise InvalidRequest(
                "data_parallel_size 0 needs workers of other hosts (--worker-listen)",
                param="data_parallel_size",
            )

    def _check_nodes(self) -> None:
        if self.nnodes > 1 and not self.uses_ray:
            raise InvalidRequest(
                "nnodes is for workers of Ray (--distributed-executor-backend ray): start others "
                "with trioserve worker --nnodes on each host",
                param="nnodes",
            )
        if self.num_ranks % self.nnodes:
            raise InvalidRequest(
                f"nnodes {self.nnodes} doesn't divide the {self.num_ranks} processes of a worker "
                "(--tensor-parallel-size times --pipeline-parallel-size)",
                param="nnodes",
            )

    def _check_roles(self) -> None:
        roles = self.disaggregation
        count = self.data_parallel_size if self.uses_ray else self.num_workers
        if len(roles) > count:
            raise InvalidRequest(
                f"disaggregation names {len(roles)} roles, and there are {count} workers: name one "
                "for each, or raise --data-parallel-size",
                param="disaggregation",
            )
        if "auto" in roles and len(roles) > 1:
            raise InvalidRequest(
                "disaggregation names auto among other roles: auto is for all workers, and is "
                "given once",
                param="disaggregation",
            )
        for role, others in (("decode", "prefill"), ("prefill", "decode")):
            if len(roles) == count and set(roles) == {role}:
                raise InvalidRequest(
                    f"disaggregation names {role} for all workers: one has to be {others} or both",
                    param="disaggregation",
                )

    def _check_devices(self) -> None:
        devices = self.worker_devices
        if devices and self.uses_ray:
            raise InvalidRequest(
                "worker_devices isn't for workers of Ray, which gives each its device",
                param="worker_devices",
            )
        if devices and self.data_parallel_size not in (1, len(devices)):
            raise InvalidRequest(
                f"worker_devices has {len(devices)} devices, and --data-parallel-size is "
                f"{self.data_parallel_size}: name a device for each worker, or leave the size out",
                param="worker_devices",
            )
        gpus = [int(each.partition(":")[2]) for each in devices if each.startswith("cuda")]
        for one, other in itertools.combinations(gpus, 2):
            if one == other:
                raise InvalidRequest(
                    f"worker_devices has cuda:{one} twice: a GPU has one worker",
                    param="worker_devices",
                )
            if abs(one - other) < self.num_ranks:
                raise InvalidRequest(
                    f"worker_devices has cuda:{one} and cuda:{other}, and a worker has "
                    f"{self.num_ranks} GPUs from its own on (--tensor-parallel-size times "
                    "--pipeline-parallel-size)",
                    param="worker_devices",
                )
        for device in devices:
            if self.device not in ("auto", device.partition(":")[0]):
                raise InvalidRequest(
                    f"worker_devices has {device}, and --device is {self.device}: leave one out",
                    param="worker_devices",
                )
