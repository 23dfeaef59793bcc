"""Teachers: policies that a policy is distilled from."""

from lgrpo.teachers.base import Teacher
from lgrpo.teachers.distillation import Distillation
from lgrpo.teachers.frozen import FrozenTeacher
from lgrpo.teachers.server import ServerTeacher

__all__ = ["Distillation", "FrozenTeacher", "ServerTeacher", "Teacher"]
