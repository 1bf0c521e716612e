"""The engines of rings: gradients averaged by Horovod or torch, also where workers may be lost."""
