"""Generated games of graded difficulty."""

from lgrpo.environments.games.base import Game, Play
from lgrpo.environments.games.guess_number import GuessNumber
from lgrpo.environments.games.maze import TextMaze
from lgrpo.environments.games.twenty_questions import TwentyQuestions

__all__ = ["Game", "GuessNumber", "Play", "TextMaze", "TwentyQuestions"]
