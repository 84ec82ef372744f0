"""Broken configurations of a run and of its servers: the key that preflight names and a part of the
fix.
"""

from tests.unit.launch.broken_cases import GPUS, Case, bad_server, edit_config, write

BENCHMARK = "evaluation.benchmarks=[{path: x.jsonl, name: x, preset: aime}]"
SGLANG = [
    "rollout=null",
    "rollout.engine=sglang",
    "rollout.sampling.max_response_tokens=8",
    "rollout.sync.transport=disk",
]
CPU_SERVER = [*SGLANG, "rollout.servers.device=cpu"]

CONFIGURATION = [
    Case(
        "unknown key", ["optimizer.lrr=1"], key="optimizer.lrr", fix="did you mean `optimizer.lr`"
    ),
    Case("wrong section", ["batch.beta=1"], key="batch.beta", fix="did you mean `objective.beta`"),
    Case(
        "other strategy's key",
        ["objective.clip_low=0.1"],
        key="objective.clip_low",
        fix="remove the key",
    ),
    Case("wrong type", ["run.steps='10'"], key="run.steps", fix="remove the quotes"),
    Case("out of range", ["optimizer.lr=0"], key="optimizer.lr", fix="expected greater than 0"),
    Case("not a number", ["optimizer.lr=.nan"], key="optimizer.lr", fix="finite"),
    Case(
        "misspelt choice", ["precision.dtype=bf61"], key="precision.dtype", fix="did you mean bf16"
    ),
    Case(
        "unknown strategy",
        ["reward.name=maths", "reward.function=null"],
        key="reward.name",
        fix="did you mean math",
    ),
    Case("ranks do not factor", ["run.nproc=3"], key="run.nproc", fix="3 ranks are not a multiple"),
    Case("tp and heads", ["parallel.tp=8"], key="parallel.tp", fix="use one of 1, 2"),
    Case(
        "tp and odd ffn", key="parallel.tp", fix="use 1", breaks=edit_config(intermediate_size=127)
    ),
    Case(
        "pp and layers",
        ["parallel.tp=1", "parallel.pp=4"],
        key="parallel.pp",
        fix="make it one of 1, 2",
    ),
    Case(
        "vpp without pp",
        ["parallel.vpp=2"],
        key="parallel.vpp",
        fix="change parallel.pp, or remove parallel.vpp",
    ),
    Case(
        "ep on a dense model",
        ["parallel.ep=2", "run.nproc=4"],
        key="parallel.ep",
        fix="set parallel.ep=1",
    ),
    Case(
        "sequence parallel alone",
        ["parallel.tp=1", "parallel.sequence_parallel=true"],
        key="parallel.sequence_parallel",
        fix="change parallel.tp, or remove",
    ),
    Case(
        "budget too small",
        ["batch.tokens_per_microbatch=100"],
        key="batch.tokens_per_microbatch",
        fix="use at least 140",
    ),
    Case(
        "more updates than prompts",
        ["batch.updates_per_step=5"],
        key="batch.updates_per_step",
        fix="use at most 4",
    ),
    Case(
        "no siblings",
        ["batch.samples_per_prompt=1"],
        key="batch.samples_per_prompt",
        fix="use at least 2",
    ),
    Case(
        "fewer samples than replicas",
        ["run.nproc=20", "batch.prompts_per_step=2", "parallel.tp=1", "batch.updates_per_step=1"],
        key="batch.prompts_per_step",
        fix="use fewer ranks",
    ),
    Case(
        "fp8 in fp32",
        ["precision.fp8.recipe=delayed"],
        key="precision.dtype",
        fix="change precision.dtype, or remove",
    ),
    Case(
        "fp8 on CPU",
        ["precision={dtype: bf16, fp8: {recipe: delayed}}"],
        key="precision.fp8",
        fix="change resources.gpus_per_node, or remove precision.fp8",
    ),
    Case(
        "fp8 on an A100",
        [*GPUS, "resources.gpu=a100", "precision={dtype: bf16, fp8: {recipe: delayed}}"],
        key="precision.fp8",
        fix="change resources.gpu, or remove",
    ),
    Case(
        "GPUs without a name",
        ["resources.gpus_per_node=8"],
        key="resources.gpu",
        fix="set it to a100",
    ),
    Case("nproc beside GPUs", [*GPUS, "run.nproc=2"], key="run.nproc", fix="or remove run.nproc"),
    Case(
        "rollout nodes for the embedded engine",
        [*GPUS, "resources.rollout_nodes=1"],
        key="resources.rollout_nodes",
        fix="change rollout.engine, or remove",
    ),
    Case(
        "more servers than GPUs",
        [
            *GPUS,
            *SGLANG,
            "rollout.servers={python: [python], count: 9, visible_devices: [a,b,c,d,e,f,g,h,i]}",
        ],
        key="rollout.servers.count",
        fix="use at most 8 servers",
    ),
    Case(
        "colocated on two nodes, odd",
        [
            *GPUS,
            *SGLANG,
            "resources.nodes=2",
            "rollout.servers={python: [python], colocated: true}",
        ],
        key="rollout.servers.count",
        fix="use a multiple of 2",
    ),
    Case(
        "colocated on two nodes by broadcast",
        [
            *GPUS,
            *SGLANG,
            "rollout.sync.transport=broadcast",
            "resources.nodes=2",
            "rollout.servers={python: [python], colocated: true, count: 2}",
        ],
        key="rollout.sync.transport",
        fix="use disk",
    ),
    Case(
        "colocated on two nodes, named GPUs",
        [
            *GPUS,
            *SGLANG,
            "resources.nodes=2",
            "rollout.servers={python: [python], colocated: true, count: 2, visible_devices: ['0', "
            "'1']}",
        ],
        key="rollout.servers.visible_devices",
        fix="remove it",
    ),
    Case(
        "ipc across nodes",
        [
            *GPUS,
            *SGLANG,
            "rollout.sync.transport=ipc",
            "resources.rollout_nodes=1",
            "rollout.servers={python: [python]}",
        ],
        key="rollout.sync.transport",
        fix="use broadcast or disk",
    ),
    Case(
        "sft needs demonstrations",
        ["objective.name=sft"],
        key="rollout.engine",
        fix="rollout.engine=demonstrations",
    ),
    Case("no verifier", ["reward=null"], key="reward", fix="add reward.name"),
    Case(
        "benchmarks without sampling",
        [BENCHMARK],
        key="evaluation.sampling",
        fix="add max_response_tokens",
    ),
    Case("preset and columns", ["data.train.preset=gsm8k"], key="data.train", fix="set one"),
    Case(
        "warm-up longer than the run",
        ["optimizer.schedule=linear", "optimizer.warmup_updates=4"],
        key="optimizer.warmup_updates",
        fix="use less than 4",
    ),
    Case(
        "a run's name that leaves the folder",
        ["run.name=../other"],
        key="run.name",
        fix="correct it",
    ),
    Case(
        "time limit below the signal",
        ["resources.time_limit=00:05:00"],
        key="resources.time_limit",
        fix="raise it",
    ),
    Case(
        "longer than the model's positions",
        ["rollout.sampling.max_response_tokens=1000", "batch.tokens_per_microbatch=2000"],
        key="rollout.sampling.max_response_tokens",
        fix="lower one of them",
    ),
    Case(
        "odd time limit",
        ["resources.time_limit=4h"],
        key="resources.time_limit",
        fix="expected [days-]hours:minutes:seconds",
    ),
]

SERVERS = [
    Case(
        "broadcast from another host's address",
        [
            *CPU_SERVER,
            "rollout.servers.python=[python]",
            "rollout.sync.transport=broadcast",
            "rollout.sync.host=203.0.113.9",
        ],
        key="rollout.sync.host",
        fix="ip addr",
        env={"SLURM_JOB_ID": "1"},
    ),
    Case(
        "no server at the url",
        [*SGLANG, "rollout.urls=['http://127.0.0.1:9']"],
        key="rollout.urls",
        fix="correct the address",
    ),
    Case(
        "server that ends",
        [*CPU_SERVER, "rollout.servers.python=[./bin/python]"],
        key="rollout.servers",
        fix="out of memory",
        breaks=bad_server("echo out of memory; exit 3"),
    ),
    Case(
        "server that never responds",
        [*CPU_SERVER, "rollout.servers.python=[./bin/python]", "rollout.servers.start_timeout_s=1"],
        key="rollout.servers",
        fix="start_timeout_s",
        breaks=bad_server("exec sleep 60"),
    ),
    Case(
        "server tp and heads",
        [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.servers.tp=3"],
        key="rollout.servers.tp",
        fix="use one of 1, 2, 4",
    ),
    Case(
        "server larger than a node",
        [*GPUS, *SGLANG, "rollout.servers={python: [python], tp: 16}"],
        key="rollout.servers.tp",
        fix="change one of them",
    ),
    Case(
        "evaluation longer than the context",
        [
            *CPU_SERVER,
            "rollout.servers.python=[python]",
            "rollout.servers.context_length=200",
            BENCHMARK,
            "evaluation.sampling={max_response_tokens: 100}",
        ],
        key="rollout.servers.context_length",
        fix="use at least 228",
    ),
    Case(
        "url that is none",
        [*SGLANG, "rollout.urls=[nourl]"],
        key="rollout.urls",
        fix="http://<host>:<port>",
    ),
    Case(
        "interpreter that cannot run",
        [*CPU_SERVER, "rollout.servers.python=[./bin/python]"],
        key="rollout.servers.python",
        fix="set an existing interpreter",
        breaks=write("bin/python", ""),
    ),
    Case(
        "no SGLang there",
        [*CPU_SERVER, "rollout.servers.python=[/nothere/python]"],
        key="rollout.servers.python",
        fix="set an existing interpreter",
    ),
    Case(
        "context too short",
        [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.servers.context_length=100"],
        key="rollout.servers.context_length",
        fix="use at least 136",
    ),
    Case(
        "key variable unset",
        [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.api_key_env=PACS_NO_SUCH_KEY"],
        key="rollout.api_key_env",
        fix="export it",
    ),
    Case(
        "servers and urls",
        [*CPU_SERVER, "rollout.servers.python=[python]", "rollout.urls=['http://x:1']"],
        key="rollout",
        fix="exactly one of `urls` and `servers`",
    ),
]
