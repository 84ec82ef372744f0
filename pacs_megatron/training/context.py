"""Builds the components of one rank of a run. The cheap checks run first."""

import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from pacs_megatron.checkpoint.adapters import (
    LoraFacts,
    combined_digest,
    facts_of,
    read_peft,
    tensor_digests,
)
from pacs_megatron.checkpoint.megatron_weights import (
    is_megatron_checkpoint,
    open_weights,
    weights_folder,
)
from pacs_megatron.checkpoint.run_checkpoint import latest_checkpoint, verify_checkpoint
from pacs_megatron.config.layout import layout_of
from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.config.schema import OptimizerOptions, RunConfig
from pacs_megatron.config.text import local_path
from pacs_megatron.data import load_tokenizer
from pacs_megatron.data.tokenizer import check_same_vocabulary
from pacs_megatron.embedded.engine import EmbeddedEngine, Vocabulary
from pacs_megatron.errors import CheckpointError, ConfigError, RolloutError
from pacs_megatron.models import ModelSpec, load_spec
from pacs_megatron.models.hub import model_folder
from pacs_megatron.models.table import CRITIC_CLASS
from pacs_megatron.objectives.distill import DistillOptions
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.objectives.shared.base import Objective, ReferenceOptions
from pacs_megatron.observability.spans import Timer
from pacs_megatron.parallel import groups
from pacs_megatron.parallel.control import ControlChannel
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import gather_json
from pacs_megatron.policy.critic import Critic, critic_optimizer
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.rollout.collect import Rollouts
from pacs_megatron.rollout.driver_client import DriverClient
from pacs_megatron.runtime.environment import own_address
from pacs_megatron.sglang.weights.server_sync import ServerSync
from pacs_megatron.sglang.weights.server_sync import server_sync as build_server_sync
from pacs_megatron.training.saver import Saver
from pacs_megatron.training.signals import StopFlag

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=MegatronPolicy)


@dataclass(slots=True, kw_only=True)
class RunContext:
    """The components of one rank of a run."""

    config: RunConfig
    run_dir: Path
    model_dir: Path
    """config.json and tokenizer of `model.path`"""
    rank: Rank
    channel: ControlChannel
    policy: MegatronPolicy
    objective: Objective
    rollouts: Rollouts
    driver: DriverClient | None
    """on rank 0"""
    engine: EmbeddedEngine | None
    server_sync: ServerSync | None
    """with SGLang: on every rank, with `sync.transport: disk` on rank 0"""
    timer: Timer
    saver: Saver
    stop: StopFlag
    critic: Critic | None = None
    base_digest: str = ""
    """of the frozen weights, with adapters"""
    stop_token_ids: tuple[int, ...] = ()
    """tokens that end a response, on rank 0; every export lists them"""

    @property
    def lora_facts(self) -> LoraFacts | None:
        """The adapters and their frozen weights; None if all weights are trained."""
        options = self.config.policy.lora
        if options is None:
            return None
        return facts_of(options, self.config.model.path, self.base_digest)

    @property
    def reset_every(self) -> int | None:
        """Steps between hard resets of the frozen reference."""
        options = self.config.objective
        return options.reset_every if isinstance(options, ReferenceOptions) else None

    @property
    def models(self) -> list[MegatronPolicy]:
        """The policy, and the critic if there is one."""
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares with a frozen reference."""
        return "reference" in self.objective.logprob_passes(0)


def build_on_all_ranks(
    config: RunConfig, run_dir: Path, model_dir: Path, driver: DriverClient | None, stop: StopFlag
) -> RunContext:
    """Joins the other ranks and builds; an error on one rank is raised on all. Collective."""
    channel = join(config)
    if latest_checkpoint(run_dir) is None or config.policy.lora is not None:
        for source in _initial_weights(config, model_dir):
            if is_megatron_checkpoint(source):
                verify_checkpoint(source, channel, is_of_this_run=False)

    def build_here() -> RunContext:
        run = build(config, run_dir, model_dir, channel, driver, stop)
        for model in run.models:
            model.offload.to_host()
        if run.rank.device.type == "cuda":
            torch.cuda.empty_cache()
        return run

    def await_driver() -> None:
        assert driver is not None
        if config.rollout.starts_servers_on_trainer_gpus:
            with suppress(RolloutError):  # if the driver ended, `receive` raises its error
                driver.reply({"op": "start_servers"})
        ready, _ = driver.receive()  # or the driver's error
        driver.notices = ready["notices"]
        run.stop_token_ids = tuple(ready["stop_token_ids"])

    run = channel.run_together(build_here)
    add_base_digest(run)
    channel.run_together(await_driver, only=0)
    return run


def add_base_digest(run: RunContext) -> None:
    """Computes the digest of the frozen weights, which `saving.resume` compares. Collective."""
    if run.config.policy.lora is not None:
        run.base_digest = digest_base(weights_folder(run.model_dir), run.channel)


def digest_base(folder: Path, channel: ControlChannel) -> str:
    """`combined_digest` of the weights of a folder; each rank reads a share. Collective."""
    rank = channel.rank

    def digest_share() -> dict[str, str]:
        stored = open_weights(folder, digests=False)
        names = sorted(stored.names)
        return tensor_digests(names[rank.rank :: rank.layout.world_size], stored.get)

    digests: dict[str, str] = {}
    for share in gather_json(channel.run_together(digest_share), group=rank.control) or []:
        digests |= share
    return str(channel.broadcast_json(combined_digest(digests)))


def join(config: RunConfig) -> ControlChannel:
    """Creates the process groups; returns the control channel. Collective.

    Raises ConfigError for too few GPUs, or for a number of ranks that does not fit the layout.
    """
    world_size = groups.started_place().world_size
    _check_gpus(config)

    sglang = config.rollout.sglang
    if sglang is not None and sglang.sync.transport == "broadcast":
        # SGLang sets this for itself (entrypoints/engine.py:1905); members of one NCCL group need
        # the same value.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    if not torch.cuda.is_available():
        # One thread a rank: results do not depend on the number of cores.
        torch.set_num_threads(1)

    layout = layout_of(config, world_size)
    rank = groups.initialize(
        layout, seed=config.run.seed, control_timeout_s=config.parallel.control_timeout_s
    )
    return ControlChannel(rank)


def sending_options(rollout: SglangRollout, rank: int) -> SglangRollout:
    """The options with the address at which servers join the groups of this rank.

    `rollout.sync.host` is an address of rank 0's host. In a Slurm job the ranks of other hosts send
    weights too.
    """
    address = own_address(os.environ)
    is_with_rank_0 = rank < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if rollout.sync.transport != "broadcast" or is_with_rank_0 or address is None:
        return rollout
    sync = rollout.sync.model_copy(update={"host": address})
    return rollout.model_copy(update={"sync": sync})


def build(
    config: RunConfig,
    run_dir: Path,
    model_dir: Path,
    channel: ControlChannel,
    driver: DriverClient | None,
    stop: StopFlag,
) -> RunContext:
    """The components of this rank. Collective."""
    rank = channel.rank
    rollout = config.rollout
    policy = build_policy(config, run_dir, model_dir, rank)
    if isinstance(config.objective, DistillOptions) and rank.rank == 0:
        folder = model_folder(config.objective.teacher, "objective.teacher")
        check_same_vocabulary(
            "objective.teacher", folder, model_dir, config.model.trust_remote_code
        )

    engine = None
    if rollout.embedded is not None:
        tokenizer = load_tokenizer(str(model_dir), config.model.trust_remote_code)
        engine = EmbeddedEngine(
            model_dir,
            rollout.embedded,
            Vocabulary.from_tokenizer(tokenizer, str(model_dir)),
            rank=rank.rank,
            num_ranks=rank.layout.world_size,
            device=rank.device,
        )

    server_sync = None
    if rollout.sglang is not None and (rank.rank == 0 or rollout.sglang.sync.transport != "disk"):
        options = sending_options(rollout.sglang, rank.rank)
        server_sync = build_server_sync(options, policy.spec, run_dir / "weights")

    return RunContext(
        config=config,
        run_dir=run_dir,
        model_dir=model_dir,
        rank=rank,
        channel=channel,
        policy=policy,
        critic=build_critic(config, run_dir, model_dir, rank),
        objective=build_objective(config.objective, updates_per_step=config.batch.num_updates),
        rollouts=Rollouts(channel, driver, engine, should_stop=stop.is_set),
        driver=driver,
        engine=engine,
        server_sync=server_sync,
        timer=Timer(),
        saver=Saver(config, rank),
        stop=stop,
    )


def build_policy(
    config: RunConfig,
    run_dir: Path,
    model_dir: Path,
    rank: Rank,
    kind: type[MegatronPolicy] = MegatronPolicy,
) -> MegatronPolicy:
    """The policy with the model's weights.

    If the run has a checkpoint, the trained weights are arbitrary until `saving.resume`.

    Raises ConfigError if the model is a critic.
    """
    spec = load_spec(model_dir)
    if spec.head != "tokens":
        raise ConfigError(
            f"model.path={config.model.path} is a critic, got {CRITIC_CLASS}; use a causal "
            "language model"
        )
    policy = build_model(config, rank, spec, config.optimizer, kind)

    is_new = latest_checkpoint(run_dir) is None
    if is_new and isinstance(config.objective, DistillOptions):
        # A later checkpoint has the teacher as its frozen reference.
        teacher = model_folder(config.objective.teacher, "objective.teacher")
        _check_architecture("objective.teacher", config, spec, load_spec(teacher))
        _load(policy, teacher)
        policy.take_reference(reset_optimizer=False)
    lora = config.policy.lora
    if is_new or lora is not None:
        _load(policy, model_dir)
    if lora is not None and lora.path is not None:
        try:
            adapters = read_peft(local_path(lora.path), policy.table, lora)
        except CheckpointError as error:
            raise CheckpointError(f"policy.lora.path={lora.path}: {error}") from error
        policy.load_adapters(lambda name: adapters[name])
        ups = [tensor for name, tensor in adapters.items() if "lora_B" in name]
        policy.starts_at_base = not any(bool(tensor.any()) for tensor in ups)
    policy.measures_entropy = config.logging.step_start_entropy
    policy.measures_certainty = config.objective.needs_certainty
    policy.mismatch_threshold = config.mismatch.threshold
    policy.compare_with_sampler = config.rollout.is_sampled
    return policy


def _load(policy: MegatronPolicy, folder: Path) -> None:
    """Loads the weights of a folder from `model_folder`."""
    # Without digests: each rank has checked a share of the files before.
    stored = open_weights(weights_folder(folder), digests=False)
    policy.load_weights(lambda name: stored.get(name).to(policy.config.params_dtype))


def _check_architecture(key: str, config: RunConfig, spec: ModelSpec, stored: ModelSpec) -> None:
    """Raises ConfigError if `stored`, the model at `key`, has another architecture than `spec`."""
    if stored != replace(spec, dtype=stored.dtype):
        path = config.objective.other_models[key]
        raise ConfigError(
            f"{key}={path} has another architecture than model.path={config.model.path}; use a "
            "model of the policy's architecture"
        )


def build_critic(
    config: RunConfig, run_dir: Path, model_dir: Path, rank: Rank, kind: type[Critic] = Critic
) -> Critic | None:
    """The critic with its initial weights, same as `build_policy`; None if the objective has none.

    Raises ConfigError if its architecture is not the policy's.
    """
    objective = config.objective
    folder = _critic_folder(config, model_dir)
    if not isinstance(objective, PpoOptions) or folder is None:
        return None

    spec = load_spec(model_dir).critic()
    if folder != model_dir:
        _check_architecture("objective.critic.path", config, spec, load_spec(folder).critic())

    optimizer = critic_optimizer(config.optimizer, objective.critic.lr)
    critic = build_model(config, rank, spec, optimizer, kind)
    if latest_checkpoint(run_dir) is None:
        _load_critic(critic, weights_folder(folder))
    return critic


def _load_critic(critic: Critic, weights_dir: Path) -> None:
    """Loads the weights of a critic or of a language model, whose new head starts at 0."""
    # Without digests: each rank has checked a share of the files before.
    stored = open_weights(weights_dir, digests=False)
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in critic.table.entries:
        shapes.update(zip(entry.hf_names, entry.hf_shapes, strict=True))

    def read(name: str) -> torch.Tensor:
        is_new = name.startswith("score.") and name not in stored.names
        tensor = torch.zeros(shapes[name]) if is_new else stored.get(name)
        return tensor.to(critic.config.params_dtype)

    critic.load_weights(read)


def build_model(
    config: RunConfig, rank: Rank, spec: ModelSpec, optimizer: OptimizerOptions, kind: type[Model]
) -> Model:
    return kind(
        spec,
        rank,
        parallel=config.parallel,
        precision_options=config.precision,
        optimizer=optimizer,
        clip_grad=config.objective.clip_grad,
        total_updates=config.run.steps * config.batch.num_updates,
        tokens_per_microbatch=config.batch.tokens_per_microbatch,
        temperature=config.rollout.sampling.temperature,
        offload=config.policy.offload,
        adapters=config.policy.lora,
        seed=config.run.seed,
    )


def _check_gpus(config: RunConfig) -> None:
    """Raises ConfigError if a run on GPUs has fewer of them on this host than ranks."""
    gpus_per_node = config.resources.gpus_per_node
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus_per_node and num_gpus < num_ranks:
        raise ConfigError(
            f"resources.gpus_per_node={gpus_per_node}: torch finds {num_gpus} GPUs for "
            f"{num_ranks} ranks on {socket.gethostname()}; run `pacs-megatron preflight` for the "
            "reason, or set it to 0 to train on the CPU"
        )


def _critic_folder(config: RunConfig, model_dir: Path) -> Path | None:
    """config.json of the critic's initial weights; None without a critic."""
    objective = config.objective
    if not isinstance(objective, PpoOptions):
        return None
    path = objective.critic.path
    return model_dir if path is None else model_folder(path, "objective.critic.path")


def _initial_weights(config: RunConfig, model_dir: Path) -> list[Path]:
    """The folders that a run without a checkpoint reads weights from, each once."""
    folders = [model_dir]
    for key, path in config.objective.other_models.items():
        folder = model_folder(path, key)
        if folder not in folders:
            folders.append(folder)
    return [weights_folder(folder) for folder in folders]
