"""The launcher that has started this process, if any, and on how many GPUs the program runs."""

import os
import re

from llmc.errors import UserError
from llmc.gpu.device import gpu_errors_as_lines
from llmc.settings import parse_settings
from llmc.single_process import SINGLE_PROCESS, TORCHRUN, is_srun, launcher_of


def translate_launcher(environ):
    """Set torchrun's variables if mpirun or srun started this process; return whether a launcher
    started several."""
    names = launcher_of(environ)
    if names is None:
        return False
    environ.update({ours: environ[theirs] for ours, theirs in zip(TORCHRUN, names)})
    nodes = environ.get("SLURM_STEP_NODELIST", "127.0.0.1") if is_srun(environ) else "127.0.0.1"
    # node01 of node[01-04,7],other
    environ.setdefault("MASTER_ADDR", re.sub(r"\[([^],-]*)[^]]*\]|,.*", r"\1", nodes))
    # jobs share machines
    environ.setdefault("MASTER_PORT", str(29500 + int(environ.get("SLURM_JOB_ID", 0)) % 1000))
    return True


def on_ranks(settings_class, description, work):
    """Run work(settings, ranks) on each rank, and return the exit status. --gpus starts them if no
    launcher did."""
    if not translate_launcher(os.environ):
        settings = parse_settings(settings_class, description)
        with gpu_errors_as_lines():
            if settings.gpus == 1:
                return work(settings, SINGLE_PROCESS)
            from llmc.gpu.several.ranks import start_ranks
            return start_ranks(settings.gpus)
    from llmc.gpu.several.ranks import Ranks
    with Ranks(os.environ) as ranks, gpu_errors_as_lines():
        settings = parse_settings(settings_class, description)
        ranks.has_launcher = settings.gpus == 1
        if settings.gpus not in (1, ranks.size):
            raise UserError(f"--gpus {settings.gpus}: a launcher has started {ranks.size} ranks:"
                            " leave --gpus out")
        settings.gpus = ranks.size
        settings.check()
        return work(settings, ranks)
