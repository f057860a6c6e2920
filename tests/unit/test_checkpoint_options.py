"""Options of checkpoints: what `up`, `demo` and `chaos` are told reaches the coordinator that they start."""

import dataclasses
import itertools
import os
from pathlib import Path

import pytest

from torch_ecrec.cli.arguments import checkpoint_arguments, checkpoints_of
from torch_ecrec.cli.main import parser
from torch_ecrec.coordinator.checkpoint_settings import CheckpointSettings

OPTIONS = {  # each another value than without a word
    "--checkpoint": "store",
    "--checkpoint-every": "90s",
    "--checkpoint-keep": "5",
    "--checkpoint-policy": "one-shot",
    "--checkpoint-bytes-per-s": "1234.5",
    "--checkpoint-timeout": "12.5",
    "--checkpoint-zstd": "3",
    "--beyond": "partial",
    "--most-lost-samples": "0.25",
    "--checkpoint-saver": "mfu",
    "--checkpoint-portion": "0.25",
}
WORDS = [word for option in OPTIONS.items() for word in option]


@pytest.mark.parametrize("command", ["up", "demo"])
def test_every_option_reaches_the_coordinator(command: str) -> None:
    said = checkpoint_arguments(parser().parse_args([command, *WORDS]))
    here = checkpoints_of(parser().parse_args([command, *WORDS, *(["--run", "x"] if command == "up" else [])]))
    there = checkpoints_of(parser().parse_args(["coordinator", *said, "--run", "x"]))
    if command == "demo":
        here = dataclasses.replace(here, run="x")
    assert there == here
    without = CheckpointSettings()
    same = {name for name, value in vars(there).items() if value == getattr(without, name)}
    assert same == {"every_steps", "again_s"}, "which no option is about, or is by steps"
    assert there.timeout_s == 12.5


def test_savers_want_somebody_who_reads_what_they_save() -> None:
    words = ["up", "--checkpoint", "store", "--checkpoint-every", "100", "--checkpoint-saver", "scar"]
    with pytest.raises(ValueError, match=r"`saver` is 'scar', whose saves only a partial recovery reads"):
        checkpoint_arguments(parser().parse_args([*words, "--beyond", "checkpoint"]))
    words += ["--beyond", "partial"]
    assert checkpoints_of(parser().parse_args(words)).saves_every == 12
    with pytest.raises(ValueError, match=r"`portion` must be above 0 and below 1, got 1\.0"):
        checkpoint_arguments(parser().parse_args([*words, "--checkpoint-portion", "1"]))
    with pytest.raises(ValueError, match=r"`every_steps` must be at least 200, .* got 100"):
        checkpoint_arguments(parser().parse_args([*words, "--checkpoint-portion", "0.005"]))


def test_chaos_has_all_that_a_coordinator_is_told() -> None:
    arguments = parser().parse_args(["chaos"])
    arguments.checkpoint, arguments.beyond = "store", "checkpoint"
    there = checkpoints_of(parser().parse_args(["coordinator", *checkpoint_arguments(arguments)]))
    assert (there.url, there.beyond) == (os.path.abspath("store"), "checkpoint")
    assert (there.every_s, there.policy) == (3.0, "consecutive")
    assert there.timeout_s == CheckpointSettings().timeout_s


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_a_time_that_cannot_be_is_refused(seconds: str) -> None:
    arguments = parser().parse_args(["up", *WORDS, "--checkpoint-timeout", seconds])
    with pytest.raises(ValueError, match=f"`timeout_s` must be positive, got {float(seconds)}"):
        checkpoint_arguments(arguments)


def test_a_relative_folder_is_the_same_to_processes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers were told `store`, and looked for it in their own working directory."""
    monkeypatch.chdir(tmp_path)
    words = ["up", "--servers", "3", "--checkpoint", "store", "--checkpoint-every", "5", "--restore"]
    for restore, whole in (("old@3", f"{tmp_path}/old@3"), ("newest", "newest"), ("s3://b/old@3", "s3://b/old@3")):
        options = dict(itertools.pairwise(checkpoint_arguments(parser().parse_args([*words, restore]))))
        assert (options["--checkpoint"], options["--restore"]) == (f"{tmp_path}/store", whole)
