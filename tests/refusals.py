# SPDX-License-Identifier: Apache-2.0
"""What every refused option has in common."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_rocketkv.config import RocketKVConfig


def refusal(options: Any) -> str:
    """The one sentence with which ``options`` are refused."""
    with pytest.raises(ValueError, match=r"\Arocketkv: option '[^']+' ") as caught:
        RocketKVConfig.parse(options)
    text = str(caught.value)
    assert type(caught.value) is ValueError, "pydantic's own error is several lines long"
    assert "\n" not in text, text
    assert not text.endswith(".")
    assert ". " not in text
    return text
