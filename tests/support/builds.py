"""What a process of this build says of itself when it joins."""

from typing import Any

from torch_ecrec.protocol.messages import whole_build

BUILD: dict[str, Any] = {"version": whole_build().version, "messages": whole_build().messages}
