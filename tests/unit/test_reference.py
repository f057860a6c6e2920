"""The reference of settings and commands is made from the code, is whole, and stands in docs."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest
from places import ROOT

from torch_ecrec.cli.main import COMMANDS, main, parser
from torch_ecrec.cli.reference import reference
from torch_ecrec.compat.argparse import arguments_of, commands_of
from torch_ecrec.spec.settings import OTHERS, PREFIX, Settings

PAGE = ROOT / "docs" / "reference.md"


def test_the_page_is_that_of_the_code() -> None:
    assert reference() == PAGE.read_text(), "python -m torch_ecrec.cli.reference > docs/reference.md"


def test_every_setting_and_every_command_has_a_meaning() -> None:
    explained = Settings.explained()
    assert list(explained) == [field.name for field in dataclasses.fields(Settings)]
    assert not [name for name, meaning in explained.items() if len(meaning) < 20] and all(OTHERS.values())

    def without(command: argparse.ArgumentParser, prefix: str) -> list[str]:
        found = [f"{prefix} {one.names or one.value}" for one in arguments_of(command) if not one.meaning.strip()]
        for name, inner, meaning in commands_of(command):
            found += [] if meaning else [f"{prefix} {name}"]
            found += without(inner, f"{prefix} {name}")
        return found

    assert not without(parser(), "torch-ecrec")
    page = reference()
    assert [name for name, *_ in commands_of(parser())] == list(COMMANDS)
    assert all(f"### torch-ecrec {name}\n" in page for name in COMMANDS)
    assert all(f"`{PREFIX}{name.upper()}`" in page for name in [*explained, *OTHERS])
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in page.splitlines() if line.startswith("|")]
    assert set(cells) == {4}, "three cells in each row"


def test_settings_say_what_they_are_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCH_ECREC_LEASE_S", "3")
    monkeypatch.setenv("TORCH_ECREC_SECRET", "nobody may read this")
    assert main(["settings"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^TORCH_ECREC_LEASE_S +3 +10 +changed$", said, re.M) and "nobody may" not in said
    assert re.search(r"^TORCH_ECREC_SECRET +\(set\)", said, re.M) and said.count("changed") == 2
    for name in ("lease_s", "TORCH_ECREC_LEASE_S"):
        assert main(["settings", name]) == 0
        said = capsys.readouterr().out
        assert said.startswith("TORCH_ECREC_LEASE_S = 3 (by default 10)\n\n") and "counts as lost" in said
    assert main(["settings", "secret"]) == 0 and "of 16" in capsys.readouterr().out
    assert main(["settings", "leas_s"]) == 2 and "did you mean lease_s?" in capsys.readouterr().err
    assert main(["settings", "xyzzyx"]) == 2 and "lists them" in capsys.readouterr().err
    monkeypatch.setenv("TORCH_ECREC_LEASES", "3")
    assert main(["settings"]) == 2 and "did you mean TORCH_ECREC_LEASE_S?" in capsys.readouterr().err
