"""Training over a Ray cluster (``arpo[ray]``): engines, environments and learner ranks as actors that are placed by resources and replaced when they die.

settings.py   how many of each, on what
engines.py    an actor that holds a policy, and the policy that stands for it elsewhere; weights in the object store
rollouts.py   actors that hold environments and sample groups, and the sampler that hands the groups out
launch.py     ``ray_train``: all of it for one run
quiet.py      what runs first in every process that Ray starts
"""
