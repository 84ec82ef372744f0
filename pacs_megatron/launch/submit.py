"""`submit`: submit a run or a sweep to Slurm as a NeMo-Run experiment, one job or a chain per run.

The job does the same as slurm/train.sbatch: it opens an attempt, srun starts each rank (or a torchrun on each node), the
signal before the time limit reaches the ranks, and the end of the script decides on a requeue. NeMo-Run writes and
submits the batch script. Its retries are off, because it also retries an invalid configuration.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.cluster import ClusterConfig
from pacs_megatron.config.layout import ranks_to_start
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.job import job_states, known_jobs, note_jobs
from pacs_megatron.launch.train import check_model_and_layout, check_model_is_here
from pacs_megatron.plan import constants
from pacs_megatron.plan.known_models import find_spec
from pacs_megatron.plan.plan import make_plan
from pacs_megatron.runtime.run_folder import run_folder

EXPERIMENTS = ".nemo_run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Arguments of `submit`."""

    config: Path
    overrides: tuple[str, ...]
    cluster: ClusterConfig
    sweep: tuple[str, ...] = ()
    """`key=a,b,c` each; each combination is a run."""
    seeds: int = 1
    convert: bool = False
    """Convert the model to a Megatron checkpoint in a job before training."""
    evaluate: bool = False
    """Evaluate the exported model in a job after training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a request."""

    name: str
    overrides: tuple[str, ...]
    loaded: LoadedConfig
    converted: Path | None = None
    """Checkpoint that the conversion job writes. Runs of a sweep with the same model share it."""


def expand(request: Request) -> list[Job]:
    """All runs of a request, loaded and checked. Raises ConfigError before anything is submitted."""
    axes = [_axis(text) for text in request.sweep]
    _check_axes(request)
    if request.seeds < 1:
        raise ConfigError(f"--seeds {request.seeds}: expected 1 or more")
    if request.seeds > 1:
        first = load_config(request.config, request.overrides).config.run.seed
        axes.append([f"run.seed={first + index}" for index in range(request.seeds)])
    base = load_config(request.config, request.overrides).config
    jobs: list[Job] = []
    for choice in itertools.product(*axes):
        name = "-".join([base.run.name, *(_short(text) for text in choice)])
        overrides = (*request.overrides, *choice, *([f"run.name={name}"] if choice else []))
        loaded = load_config(request.config, overrides)
        check_model_and_layout(loaded, ranks_to_start(loaded.config))
        if request.evaluate and not loaded.config.evaluation.benchmarks:
            raise ConfigError("--evaluate: evaluation.benchmarks is empty; add a benchmark")
        if name in {job.name for job in jobs}:
            raise ConfigError(f"two runs of this request have the name {name}; sweep over values with different names")
        jobs.append(Job(name=name, overrides=overrides, loaded=loaded))
    return _with_conversions(jobs, base.run.name) if request.convert else jobs


def _with_conversions(jobs: Sequence[Job], base: str) -> list[Job]:
    """The jobs with their converted checkpoints: in the run folder, or beside the run folders of a sweep."""
    if len(jobs) == 1:
        return [replace(jobs[0], converted=(run_folder(jobs[0].loaded) / "converted").resolve())]
    models = list(dict.fromkeys(_model_of(job) for job in jobs))
    targets = {}
    for number, (run_dir, path) in enumerate(models, start=1):
        targets[run_dir, path] = (Path(run_dir) / f"{base}-converted{f'-{number}' if number > 1 else ''}").resolve()
    return [replace(job, converted=targets[_model_of(job)]) for job in jobs]


def _model_of(job: Job) -> tuple[str, str]:
    return job.loaded.config.run.dir, job.loaded.config.model.path


def _check_axes(request: Request) -> None:
    keys = [text.partition("=")[0] for text in request.sweep] + ["run.seed"] * (request.seeds > 1)
    for key in keys:
        if key == "run.name":
            raise ConfigError("--sweep run.name: runs are named by their values; sweep over another key")
        if keys.count(key) > 1:
            options = "--sweep and --seeds both set" if key == "run.seed" and request.seeds > 1 else "two --sweep set"
            raise ConfigError(f"{options} {key}; give all its values in one --sweep {key}=a,b,c")


def _axis(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    found = _split(values)
    if not equals or not key or not all(value.strip() for value in found):
        raise ConfigError(f"--sweep {text!r}: expected key=a,b,c such as objective.beta=0.5,1,2")
    return [f"{key}={value}" for value in found]


def _split(values: str) -> list[str]:
    """Split at commas outside of brackets and quotes: `[a,b],[c]` are two values."""
    parts, depth, quote = [""], 0, ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _short(override: str) -> str:
    key, _, value = override.partition("=")
    return re.sub(r"[^A-Za-z0-9.]+", "_", f"{key.rsplit('.', 1)[-1]}{value}")


# ------------------------------------------------------------------------------------------------------------- commands
def train_command(job: Job, request: Request) -> str:
    """Shell lines that each task of the trainer runs."""
    arguments = [str(request.config.resolve()), *job.overrides]
    if job.converted is not None:
        arguments.append(f"model.path={job.converted}")
    python = _python(request.cluster)
    resources = job.loaded.config.resources
    lines = [f"cd {shlex.quote(os.getcwd())}"]
    attached = ""
    if resources.rollout_nodes:
        timeout = _server_timeout(job)
        folder = '"$PACS_ATTEMPT/servers"'
        lines.append(
            f"urls=$({python} -m pacs_megatron.launch.job urls {folder} {timeout} {resources.rollout_nodes}) || exit $?"
        )
        attached = ' rollout.servers=null "rollout.urls=[$urls]"'
        rollout = job.loaded.config.rollout.sglang
        if rollout is not None and rollout.sync.transport == "broadcast":
            attached += ' "rollout.sync.host=$MASTER_ADDR"'
    if request.cluster.launcher == "torchrun":
        start = (
            f"{python} -m pacs_megatron.launch.agent --nnodes={resources.nodes} "
            f"--nproc-per-node={ranks_to_start(job.loaded.config) // resources.nodes} --rdzv-backend=c10d "
            '--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID" -m pacs_megatron'
        )
    else:
        start = f"{python} -m pacs_megatron"
    lines.append(f"exec {start} train {shlex.join(arguments)}{attached}")
    return "\n".join(lines)


def serve_command(job: Job, request: Request) -> str:
    """Shell lines that the task of each rollout node runs."""
    arguments = shlex.join([str(request.config.resolve()), *job.overrides])
    return (
        f"cd {shlex.quote(os.getcwd())}\n"
        f'exec {_python(request.cluster)} -m pacs_megatron.launch.serve "$PACS_ATTEMPT/servers" {arguments}'
    )


def site_lines(cluster: ClusterConfig) -> str:
    """Shell lines of each batch script before its first srun: environment, modules, setup, working directory."""
    # NeMo-Run's env_vars writes names in capitals and values without quotes.
    lines = [f"export {name}={shlex.quote(value)}" for name, value in cluster.task_environment().items()]
    lines.extend(f"module load {module}" for module in cluster.modules)
    lines.extend(cluster.setup)
    return "\n".join([*lines, f"cd {shlex.quote(os.getcwd())}"])


def setup_lines(job: Job, request: Request) -> str:
    """Shell lines of the trainer's batch script before its first srun: setup, begin and end of the attempt."""
    cluster, config = request.cluster, job.loaded.config
    # The batch script runs outside of the container, so it uses the interpreter that runs `submit`.
    python = shlex.join(cluster.python if cluster.container is None else (sys.executable,))
    run_dir = shlex.quote(str(run_folder(job.loaded).resolve()))
    stop_servers = 'touch "$PACS_ATTEMPT/servers/stop"; ' if config.resources.rollout_nodes else ""
    lines = [site_lines(cluster)]
    lines.extend(
        [
            'export MASTER_ADDR="${PACS_MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"',
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))",
            f"export PACS_ATTEMPT; PACS_ATTEMPT=$({python} -m pacs_megatron.launch.job begin {run_dir}) || exit $?",
            'PACS_ATTEMPT=$(readlink -f "$PACS_ATTEMPT")',
            # Link the log that srun writes for NeMo-Run as the attempt's log.
            'pacs_out=$(scontrol show job "$SLURM_JOB_ID" | sed -n "s/^ *StdOut=//p" | head -n 1)',
            'ln -sfn "$(dirname "$pacs_out")/log-${SLURM_JOB_NAME}_${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}.out" '
            '"$PACS_ATTEMPT/output.log"',
            f"trap 'pacs_code=$?; trap - EXIT; {stop_servers}{python} -m pacs_megatron.launch.job end --requeue {run_dir} "
            f"$pacs_code {config.resources.max_attempts}; exit' EXIT",
        ]
    )
    return "\n".join(lines)


def _python(cluster: ClusterConfig) -> str:
    return shlex.join([*cluster.command_prefix(), *cluster.python])


def _server_timeout(job: Job) -> float:
    servers = job.loaded.config.rollout.managed_servers
    assert servers is not None
    return servers.start_timeout_s


# ------------------------------------------------------------------------------------------------------------- NeMo-Run
def _nemo_run() -> Any:
    try:
        import nemo_run
    except ImportError as error:
        raise ConfigError(
            f"cannot import NeMo-Run ({error}); pip install nemo-run==0.11.1 leptonai==0.27.0, or: sbatch "
            "slurm/train.sbatch CONFIG"
        ) from None
    return nemo_run


def submit(request: Request, *, dry_run: bool) -> Iterator[str]:
    """Submit, and yield lines to print: the job ids, or for a dry run each batch script and resolved configuration.

    Raises ConfigError before anything is submitted.
    """
    jobs = expand(request)
    if not dry_run:
        if shutil.which("sbatch") is None:
            raise ConfigError("`sbatch` is not on PATH; submit from the cluster's login node, or use --dry-run")
        _check_models_are_here(jobs, request.cluster)
        _refuse_what_is_queued(jobs)
    yield from _warnings(jobs)
    # NeMo-Run reads these variables on import.
    os.environ.setdefault("NEMORUN_HOME", str((Path(jobs[0].loaded.config.run.dir) / EXPERIMENTS).resolve()))
    os.environ.setdefault("NEMORUN_SKIP_CONFIRM_DRYRUN", "1")
    run = _nemo_run()
    # Jobs can depend on each other within one experiment only, so runs that share a conversion are in one.
    shares = request.convert and len(jobs) > 1
    submitted: list[str] = []
    for group in [jobs] if shares else [[job] for job in jobs]:
        title = load_config(request.config, request.overrides).config.run.name if shares else group[0].name
        with run.Experiment(title) as experiment:
            tasks = _add_tasks(run, experiment, group, request)
            if dry_run:
                yield from _dry_run(experiment, group)
                continue
            ids = _launch(experiment, submitted)
        for job in group:
            mine = [(label, ids[task]) for label, task, owner in tasks if owner == job.name]
            note_jobs(run_folder(job.loaded), mine)
            submitted.append(job.name)
            text = ", ".join(f"{label}={job_id}" for label, job_id in mine)
            yield f"{job.name}: submitted {text}; pacs-megatron status {run_folder(job.loaded)}"
        for label, task, owner in tasks:
            if owner is None:
                yield f"before all of them: {label}={ids[task]}"


def _warnings(jobs: Sequence[Job]) -> Iterator[str]:
    """Warnings of `plan`. They do not stop a submission, because some of its constants are assumed."""
    for job in jobs:
        if find_spec(job.loaded.config.model.path) is not None and not (plan := make_plan(job.loaded)).fits:
            share = plan.peak.total / (constants.GPUS[plan.gpu.name].memory_gib * constants.GIB) if plan.gpu else 0.0
            yield (
                f"# warning: {job.name} does not fit on a GPU according to `pacs-megatron plan` ({share:.0%} at the peak); "
                "run it for a fix"
            )


def _dry_run(experiment: Any, jobs: Sequence[Job]) -> Iterator[str]:
    experiment.dryrun(log=False, delete_exp_dir=False)
    folder = Path(experiment._exp_dir)
    for job in jobs:
        yield f"# {job.name}: resolved configuration\n{job.loaded.to_yaml()}"
    title = jobs[0].name if len(jobs) == 1 else experiment._title
    for task in experiment.jobs:
        if task.dependencies:
            yield f"# {title}: {task.id} starts after {', '.join(task.dependencies)} (sbatch --dependency=afterok)"
    for script in sorted(folder.rglob("*_sbatch.sh")):
        yield f"# {title}: {script.name}\n{script.read_text(encoding='utf-8')}"
    for script in sorted(folder.rglob("scripts/*.sh")):
        yield f"# {title}: {script.name}, run by every task\n{script.read_text(encoding='utf-8')}"
    shutil.rmtree(folder)
    with suppress(OSError):
        folder.parent.rmdir()  # only if no other experiment has this name


def _launch(experiment: Any, before: Sequence[str]) -> dict[str, str]:
    """Slurm id of each task. If sbatch refuses one, cancels the others of the experiment and raises ConfigError."""
    from invoke.exceptions import UnexpectedExit

    try:
        experiment.run(detach=True, tail_logs=False)
    except UnexpectedExit as error:
        submitted = [
            _job_id(task) for task in experiment.jobs if getattr(task, "handles", None) or vars(task).get("handle")
        ]
        if submitted:
            subprocess.run(["scancel", *submitted], capture_output=True, check=False)
        shutil.rmtree(experiment._exp_dir, ignore_errors=True)
        reason = "; ".join(line.removeprefix("sbatch: error: ") for line in error.result.stderr.strip().splitlines())
        stay = f"; submitted before it: {', '.join(before)}" if before else ", nothing was submitted"
        raise ConfigError(
            f"sbatch refused the job: {reason}; correct the cluster's file (--cluster) or `resources`{stay}"
        ) from None
    return {str(task.id): _job_id(task) for task in experiment.jobs}


def _check_models_are_here(jobs: Sequence[Job], cluster: ClusterConfig) -> None:
    """Raises ConfigError for a missing model. Skipped with a container, which may have other folders."""
    for job in jobs:
        if cluster.container is None:
            check_model_is_here(job.loaded)


def _refuse_what_is_queued(jobs: Sequence[Job]) -> None:
    """Raises ConfigError if a job of the same run is in the queue: both would write to one folder."""
    for job in jobs:
        run_dir = run_folder(job.loaded)
        states = job_states(list(known_jobs(run_dir)))
        if states:
            job_id, state = next(iter(states.items()))
            raise ConfigError(
                f"{run_dir} has job {job_id} in the queue ({state}); run `pacs-megatron cancel {run_dir}` first, or choose "
                "another run.name"
            )


def _job_id(task: Any) -> str:
    return str(task.handle).rsplit("/", 1)[-1]


def _add_tasks(run: Any, experiment: Any, jobs: Sequence[Job], request: Request) -> list[tuple[str, str, str | None]]:
    """(label, task, run name) of every task; the run name is None for a shared conversion."""
    python = f"cd {shlex.quote(os.getcwd())} && exec {_python(request.cluster)} -m pacs_megatron"
    found: list[tuple[str, str, str | None]] = []
    conversions: dict[Path, str] = {}
    alone = len(jobs) == 1
    for job in jobs:
        suffix = "" if alone else f"-{job.name}"
        target = job.converted
        if target is not None and target not in conversions:
            # The conversion is atomic. A resubmitted run reuses it.
            words = ["convert", "to-megatron", "--hf", job.loaded.config.model.path, "--out", str(target)]
            text = f"[ -e {shlex.quote(str(target))} ] && exit 0\n{python} {shlex.join(words)}"
            name = "convert" if not conversions else f"convert-{len(conversions) + 1}"
            executor = _executor(run, job, request.cluster, nodes=1, tasks=1)
            conversions[target] = experiment.add(run.Script(inline=text), executor=executor, name=name)
            found.append((name, conversions[target], job.name if alone else None))
        before = [] if target is None else [conversions[target]]
        train = _add_trainer(run, experiment, job, request, (f"train{suffix}", before))
        found.append(("train", train, job.name))
        if request.evaluate:
            model = run_folder(job.loaded) / "hf"
            arguments = shlex.join([str(request.config.resolve()), *job.overrides, "--model", str(model)])
            executor = _executor(run, job, request.cluster, nodes=1, tasks=1)
            script = run.Script(inline=f"{python} eval {arguments}")
            task = experiment.add(script, executor=executor, name=f"eval{suffix}", dependencies=[train])
            found.append(("eval", task, job.name))
    return found


def _add_trainer(run: Any, experiment: Any, job: Job, request: Request, place: tuple[str, list[str]]) -> str:
    """Add the trainer, with rollout nodes as one heterogeneous job. `place` is its name and its dependencies."""
    config, (name, before) = job.loaded.config, place
    per_node = ranks_to_start(config) // config.resources.nodes
    tasks = 1 if request.cluster.launcher == "torchrun" else per_node
    trainer = _executor(run, job, request.cluster, nodes=config.resources.nodes, tasks=tasks)
    trainer.setup_lines = setup_lines(job, request)
    script = run.Script(inline=train_command(job, request))
    if not config.resources.rollout_nodes:
        return str(experiment.add(script, executor=trainer, name=name, dependencies=before))
    servers = _executor(run, job, request.cluster, nodes=config.resources.rollout_nodes, tasks=1)
    trainer.heterogeneous = servers.heterogeneous = True
    scripts = [script, run.Script(inline=serve_command(job, request))]
    return str(experiment.add(scripts, executor=[trainer, servers], name=name, dependencies=before))


def _executor(run: Any, job: Job, cluster: ClusterConfig, *, nodes: int, tasks: int) -> Any:
    from nemo_run.core.tunnel.client import LocalTunnel

    config, container = job.loaded.config, cluster.container
    gpus = config.resources.gpus_per_node
    pyxis = container is not None and container.runtime == "pyxis"
    srun_args = ["--label", *([f"--cpu-bind={cluster.cpu_bind}"] if cluster.cpu_bind else []), *cluster.srun_args]
    # `requeue` keeps the job's id. Without `B:` the signal goes to the tasks, which are the ranks.
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        qos=cluster.qos,
        constraint=cluster.constraint,
        job_name_prefix="pacs.",
        nodes=nodes,
        ntasks_per_node=tasks,
        cpus_per_task=cluster.cpus_per_task,
        gpus_per_node=gpus if gpus and cluster.gpu_request == "gpus-per-node" else None,
        gres=f"gpu:{gpus}" if gpus and cluster.gpu_request == "gres" else None,
        mem=cluster.mem,
        exclusive=True if cluster.exclusive else None,
        time=config.resources.time_limit,
        signal=f"USR1@{config.resources.signal_lead_s}",
        # Without it a job whose dependency failed stays pending.
        additional_parameters={"requeue": True, "kill_on_invalid_dep": "yes"},
        retries=0,
        container_image=container.image if pyxis and container is not None else None,
        container_mounts=list(container.mounts) if pyxis and container is not None else [],
        setup_lines=site_lines(cluster),
        srun_args=srun_args,
        wait_time_for_group_job=0,
        monitor_group_job_wait_time=5,
        poll_estimated_start_time=False,
        packager=run.Packager(),
        tunnel=LocalTunnel(job_dir=""),
    )
