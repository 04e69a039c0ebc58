"""Overlapped launches of Triton kernels; imported only if Triton is installed.

On Hopper GPUs and later a kernel may start before its predecessor has ended (programmatic dependent launch). The
kernels of a decoding step read their weights in that time, and then wait for the predecessor's output. Until
`gdc_wait`, a kernel must therefore read constants only, and write nothing.
"""

from __future__ import annotations

from functools import cache

import torch

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]
except ImportError:  # an earlier Triton: kernels run one after the other
    gdc_launch_dependents = gdc_wait = None

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_options"]


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the arguments of a kernel call that overlap it with its predecessor, if the GPU can do so."""
    if gdc_wait is None or torch.cuda.get_device_capability(device)[0] < 9:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
