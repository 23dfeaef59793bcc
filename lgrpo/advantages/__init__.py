"""Whole groups of rewards in, advantages out. They run before a rollout is cut, since a group must be whole."""

from lgrpo.advantages.base import Advantage
from lgrpo.advantages.group import GroupCentred, GroupWhitened, LeaveOneOut

__all__ = ["Advantage", "GroupCentred", "GroupWhitened", "LeaveOneOut"]
