# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's V2 model runner and every Triton kernel run on a CPU, in Triton's interpreter.

Put this folder on PYTHONPATH and set TRITON_INTERPRET=1 and VLLM_USE_V2_MODEL_RUNNER=1: every spawned process must see it
before vLLM is imported. vLLM for CPUs keeps Triton only where it finds a backend named "cpu"; the interpreter compiles
nothing, so any compiler will do, with a driver that never claims a device.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton import backends

    nvidia = backends.backends["nvidia"]

    class InactiveDriver(nvidia.driver):  # type: ignore[name-defined,misc]
        @staticmethod
        def is_active() -> bool:
            return False

    backends.backends["cpu"] = backends.Backend(compiler=nvidia.compiler, driver=InactiveDriver)

    if os.environ.get("ROCKETKV_KERNELS") == "triton":
        import torch

        # vLLM's Triton attention chooses tile sizes by it.
        torch.cuda.get_device_capability = lambda device=None: (9, 0)

    from fast_interpreter import speed_up

    speed_up()
