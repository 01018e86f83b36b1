"""llm.c's command lines: its flags, defaults, models and epochs."""


import numpy as np
import pytest

import train_gpt2
import train_gpt2_cuda
from llmc.dataloader import write_tokens
from llmc.resume import complete_checkpoints
from llmc.settings import parse_settings, Settings
from train_speedrun import Speedrun


def notes_of(capsys, settings_class, line):
    """(settings, notes) of a command line."""
    settings = parse_settings(settings_class, "", line.split())
    return settings, capsys.readouterr().err


@pytest.mark.parametrize("line, notes", (
    ("-pn 16 -pr 0 -pg 8 -ps 10.0.0.1 -pi tcp -lg 10", (
        "note: -pn 16, -pg 8, -ps 10.0.0.1, -pi tcp: torchrun", "note: -lg 10: nvidia-smi")),
    ("-pf /shared -pi fs", ("note: -pf /shared, -pi fs: torchrun",)),
    ("--write_tensors 0", ("note: --write_tensors 0: export_weights.py",)),
    ("--device cpu", ("note: --device cpu: train_gpt2.py is for CPUs",)),
    ("-n 5", ("note: -n 5: no checkpoints, as there is no -o",)),
    ("-n 5 -o run.log", ("note: -n 5: no checkpoints, as -o run.log is a log file",)),
    ("-n 5 -o run", ()), ("-pr 0 --inference_only 0", ())))
def test_llm_c_s_flags_that_do_nothing_here(capsys, line, notes):
    _, printed = notes_of(capsys, Settings, line)
    for note in notes:
        assert note in printed
    own = [line for line in printed.splitlines() if "with llm.c's" not in line]
    assert len(own) == len(notes)


@pytest.mark.parametrize("line, words", (
    ("--inference_only 1 --write_tensors 0", "export_weights.py --write_tensors 0 --inference_"),
    ("-pm mpi", "-pm"), ("-e gpt3:c999", "expected one of d2, d4"), ("-y 1", "-y needs a dir")))
def test_llm_c_s_flags_that_are_refused(workplace, run_here, line, words):
    done = run_here(train_gpt2, *line.split(), check=False)
    assert done.returncode in (1, 2) and words in done.stderr and "Traceback" not in done.stderr


THEIR_LINE = "-v 250 -s 20000 -g 144 -b 64 -t 1024 -d 524288 -c 0.1 -l 0.0006 -q 0.0 -u 700 -e d12 "


@pytest.mark.parametrize("settings_class", (Settings, train_gpt2_cuda.CudaSettings))
@pytest.mark.parametrize("more", ("-h 1", "-r 0", "-z 1", "-lg 1", "-pn 1", "-x -1", "-e gpt2:d12"))
def test_a_flag_that_only_llm_c_has_brings_its_defaults(capsys, settings_class, more):
    """Those of its train_gpt2.cu; without one, or on a page whose model it lacks, ours stay."""
    settings, notes = notes_of(capsys, settings_class, THEIR_LINE + more)
    assert (settings.steps, settings.val_batches) == (0, 20)
    assert (settings.shuffle, settings.spread, settings.decay) == (1, 0, "matrices")
    assert (settings.warmup_steps, settings.schedule, settings.beta2) == (700, "cosine", 0.95)
    assert notes.count(f"note: with llm.c's {more.split()[0]}, what is not given is as in") == 1
    settings.fit_to_text(3)
    assert settings.steps == 0 and settings.is_llmc
    for other in (settings_class, Speedrun.Settings):
        model = "s2" if other is Speedrun.Settings else "d12"
        ours, _ = notes_of(capsys, other, f"-e {model}" + " -h 1" * (other is Speedrun.Settings))
        assert ours.steps == 1000 and ours.spread == 1 and not ours.is_llmc


def test_llm_c_s_epoch_has_the_ends_of_all_shards(workplace, run_here):
    """As its number of updates: run_gpt2_124M.sh waits for the file DONE of that step."""
    for shard in range(3):
        write_tokens(f"s_{shard}.bin", [np.arange(127, dtype=np.int32) % 257], 127)
    flags = (*"-i s_*.bin -j s_0.bin -e d2 -b 2 -t 16 -d 64 -v 0 -s 0 -o".split(), "run")
    run_here(train_gpt2, *flags, "-z", 1)
    assert complete_checkpoints("run") == [3 * 127 // 64]
    run_here(train_gpt2, *flags[:-1], "ours", "-x", 0)
    assert complete_checkpoints("ours") == [3 * (126 // 32) // 2]


@pytest.mark.parametrize("name, L, NH, C", (
    ("c384", 6, 6, 384), ("c768", 12, 12, 768), ("c1024", 24, 16, 1024), ("c1536", 24, 16, 1536),
    ("c2048", 24, 16, 2048), ("c2560", 32, 32, 2560), ("c4096", 32, 32, 4096)))
def test_gpt3_s_models(capsys, name, L, NH, C):
    """As in llm.c's gpt3_set_hyperparameters."""
    settings, _ = notes_of(capsys, Settings, f"-e gpt3:{name}")
    assert train_gpt2.SIZES[settings.model] == (L, NH, C) and settings.learning_rate == 3e-4
    ours, _ = notes_of(capsys, Settings, f"-e {settings.model}")
    assert ours.learning_rate == 0.0072 / L
