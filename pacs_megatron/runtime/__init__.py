"""Files and processes of a run that training, rollouts and launch share.

Imports neither torch nor Megatron.
"""
