"""`plan`: the plan of a run as text, and whether it fits."""

from collections.abc import Sequence
from pathlib import Path

from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.errors import ConfigError, ExitCode
from pacs_megatron.launch.verbs import PLAN_TRACE, function_of
from pacs_megatron.workbench.plan.known_models import find_spec
from pacs_megatron.workbench.plan.lengths import lengths_from
from pacs_megatron.workbench.plan.plan import make_plan
from pacs_megatron.workbench.plan.render import (
    render,
    render_comparison,
    render_search,
    verdict,
)
from pacs_megatron.workbench.plan.search import search_layouts


def run_plan(  # noqa: PLR0913  (one for each option of the verb)
    config_path: Path,
    overrides: Sequence[str],
    *,
    search: bool = False,
    compare: bool = False,
    trace: bool = False,
    local_layers: bool = False,
    lengths: str | None = None,
) -> tuple[str, ExitCode]:
    """The text to print, and OK if the run fits or may fit.

    Args:
        config_path: of the run.
        overrides: `key=value` each.
        search: all layouts on the same GPUs; OK if one fits with the highest assumptions.
        compare: the same run on other GPUs.
        trace: the memory of the training ranks from a trace instead of formulas.
        local_layers: `trace` Megatron-Core's local layers, not Transformer Engine's.
        lengths: of the samples, as `lengths_from` reads them; None: assumed ones.
    """
    if trace and (search or compare):
        raise ConfigError("plan --trace is of one layout; remove --search and --compare")
    if local_layers and not trace:
        raise ConfigError("--local-layers is an option of --trace; add --trace")
    if trace and lengths is not None:
        raise ConfigError("plan --trace is of full micro-batches; remove --lengths")
    if trace:
        traced: tuple[str, ExitCode] = function_of(PLAN_TRACE)(
            config_path, overrides, local_layers=local_layers
        )
        return traced

    loaded = load_config(config_path, overrides)
    read = None if lengths is None else lengths_from(lengths, loaded.config)
    plan = make_plan(loaded, read)
    fits = plan.may_fit
    if compare:
        text = render_comparison(plan)
    elif search:
        layouts = search_layouts(plan)
        text = render_search(layouts, plan)
        fits = any(layout.fits for layout in layouts)
    else:
        text = render(plan)
    return text, ExitCode.OK if fits else ExitCode.MISCONFIGURED


def fit_on_gpu(loaded: LoadedConfig) -> tuple[bool, str]:
    """Whether the run fits or may fit, and the line of `plan` if it does not fit for certain.

    A model that `plan` does not know fits.
    """
    if find_spec(loaded.config.model.path) is None:
        return True, ""
    plan = make_plan(loaded)
    return plan.may_fit, "" if plan.fits else verdict(plan)[0]
