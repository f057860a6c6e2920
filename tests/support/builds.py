"""What a process of this build says of itself when it joins."""

from typing import Any

from torch_ecrec.protocol.build import own_build

BUILD: dict[str, Any] = {"version": own_build().version, "messages": own_build().messages}
