"""What a plan replaces of DeepSpeed, for where it is not installed."""

from types import SimpleNamespace


class _Init:
    """``zero.Init``."""


class _GatheredParameters:
    """``zero.GatheredParameters``."""


_contexts = SimpleNamespace(GatheredParameters=_GatheredParameters, Init=_Init)
zero = SimpleNamespace(**vars(_contexts), partition_parameters=_contexts)
utils = SimpleNamespace()


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port=None,
    mpu=None,
    dist_init_required=None,
    collate_fn=None,
    config=None,
    mesh_param=None,
    config_params=None,
):
    """As DeepSpeed 0.19 declares it."""
    raise NotImplementedError
