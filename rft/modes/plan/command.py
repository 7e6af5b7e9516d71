"""`mode=plan`: the plan of a command line, with the values that its overrides and its recipe change."""

import os
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from rft.modes.plan.config_origin import origins
from rft.modes.plan.report import plan
from rft.setup.typed import typed_overrides


def plan_run(config: dict[str, Any], console: Console) -> float:
    """Prints the memory and the work that the run needs; returns the memory of a rank in GiB.

    Args:
        config: the resolved config as plain containers.
        console: of rank zero.

    Raises:
        ValueError: lists all mistakes of the config.
    """
    hydra = HydraConfig.get()
    loader = GlobalHydra.instance().config_loader()
    changed = origins(loader, str(hydra.job.config_name), typed_overrides(), "main")
    return plan(config, int(os.environ.get("WORLD_SIZE", "1")), changed, console)
