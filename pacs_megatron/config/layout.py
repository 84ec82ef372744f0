"""Values derived from a configuration: the parallel layout, the number of ranks, the draws of a
benchmark.
"""

from pacs_megatron.config.schema import BenchmarkOptions, EvaluationOptions, RunConfig
from pacs_megatron.contracts.layout import Layout


def layout_of(config: RunConfig, world_size: int) -> Layout:
    """The layout of `world_size` ranks. Check it with `layout_problems` first."""
    parallel = config.parallel
    return Layout(
        world_size=world_size,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        vpp=parallel.vpp,
        sequence_parallel=parallel.sequence_parallel,
    )


def ranks_to_start(config: RunConfig) -> int:
    """World size of the run: one rank per GPU of `resources`, else `run.nproc` ranks per node, else
    one replica of the model per node.
    """
    resources = config.resources
    if resources.gpus_per_node:
        return resources.nodes * resources.gpus_per_node
    parallel = config.parallel
    ranks_per_node = config.run.nproc or parallel.tp * parallel.pp * parallel.cp
    return ranks_per_node * resources.nodes


def draws_of(
    evaluation: EvaluationOptions, benchmark: BenchmarkOptions
) -> tuple[int, tuple[int, ...]]:
    """(responses per problem, values of k) of one of `evaluation.benchmarks`."""
    num_samples = benchmark.samples_per_prompt or evaluation.samples_per_prompt
    ks = evaluation.k if benchmark.k is None else benchmark.k
    return num_samples, ks
