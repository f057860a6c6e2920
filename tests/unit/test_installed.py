"""Which releases are tested together, and what is said of others."""

from __future__ import annotations

import warnings

import pytest
from places import ROOT

from torch_ecrec.runtime import installed


@pytest.mark.parametrize(
    ("versions", "warned"),
    [
        (("2.13.0+cpu", "1.8.0", "1.8.0"), False),
        (("2.14.1", "1.9.0", "1.9.2"), False),
        (("2.13.1+cpu", "1.8.0", "1.8.0"), True),
        (("2.14.1", "1.8.0", "1.8.0"), True),
        (("", "1.8.0", "1.8.0"), False),
    ],
)
def test_releases_that_were_not_tested_together_get_one_warning(
    versions: tuple[str, str, str], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the tested ones. Of what has no metadata, nobody knows the release."""
    here = dict(zip(("torch", "fbgemm-gpu-cpu", "torchrec"), versions, strict=True))
    monkeypatch.setattr(installed, "_version", lambda name: here.get(name, ""))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        installed.require_torchrec()
    assert len(caught) == warned
    if warned:
        assert installed.TESTED in str(caught[0].message) and installed.release(versions[0]) in str(caught[0].message)


@pytest.mark.parametrize(("torch", "wanted"), [("2.14.0", "2.14.1"), ("2.13.0+cpu", "2.13.0"), ("", "2.13.0")])
def test_what_is_missing_is_named_with_what_belongs_to_the_torch_that_is_there(
    torch: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_version", lambda name: torch if name == "torch" else "")
    monkeypatch.setattr(installed, "NEEDED", {"no_such_module": "TorchRec"})
    (right,) = (one for one in installed.SETS if one.torch == wanted)
    with pytest.raises(ImportError, match="TorchRec is not installed; on a CPU: ") as error:
        installed.require_torchrec()
    assert right.pip(False) in str(error.value) and right.pip(True) in str(error.value)


def test_tested_sets_are_those_of_the_requirements() -> None:
    for one in installed.SETS:
        folder = ROOT / "requirements" / f"torch-{one.torch.rpartition('.')[0]}"
        said = "".join(file.read_text() for file in folder.glob("*.txt"))
        assert f"\ntorch=={one.torch}\n" in said and f"fbgemm-gpu-cpu=={one.fbgemm}\n" in said
        assert f"\ntorchrec=={one.torchrec}\n" in said
