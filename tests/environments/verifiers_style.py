"""Environments as users write them for verifiers, which is imported when one is made."""

from __future__ import annotations


def hot_or_cold(max_turns=5):
    """Return a game of several turns: find a number; the rubric gives 1 for it and 0.1 for each turn less than five."""
    import verifiers as vf
    from datasets import Dataset

    class HotOrCold(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["guesses"] = []
            return state

        @vf.stop
        async def is_found(self, state):
            return state["answer"] in state["guesses"]

        async def env_response(self, messages, state, **settings):
            guess = messages[-1].content.strip()
            state["guesses"].append(guess)
            if guess == "stop":
                raise vf.Error("the player left")
            if guess == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "Found."}]
                return []
            near = guess.isdecimal() and abs(int(guess) - int(state["answer"])) < 3
            return [{"role": "user", "content": "hot" if near else "cold"}]

    def is_right(completion, answer):
        said = [message.content.strip() for message in completion if message.role == "assistant"]
        return float(answer in said)

    def saved_turns(state):
        return 5 - len(state["trajectory"])

    rows = {"question": [f"Guess, round {n}." for n in range(6)], "answer": [str(n) for n in range(6)]}
    rubric = vf.Rubric(funcs=[is_right, saved_turns], weights=[1.0, 0.1])
    return HotOrCold(dataset=Dataset.from_dict(rows), system_prompt="A game.", rubric=rubric, max_turns=max_turns)


def calculator():
    """Return an environment with a tool."""
    import verifiers as vf
    from datasets import Dataset

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: First number.
            b: Second number.
        """
        return a + b

    def has_answer(completion, answer):
        return float(answer in completion[-1].content)

    rows = {"question": ["What is 2 + 3?"], "answer": ["5"]}
    return vf.ToolEnv(tools=[add], dataset=Dataset.from_dict(rows), rubric=vf.Rubric(funcs=[has_answer]), max_turns=4)


def one_turn():
    """Return an environment of a single turn."""
    import verifiers as vf
    from datasets import Dataset

    rows = {"question": ["Say yes."], "answer": ["yes"]}
    rubric = vf.Rubric(funcs=[lambda completion, answer: float(completion[-1].content == answer)])
    return vf.SingleTurnEnv(dataset=Dataset.from_dict(rows), rubric=rubric)


def compared():
    """Return an environment whose reward compares episodes."""
    import verifiers as vf
    from datasets import Dataset

    def rank(completions):
        return [0.0] * len(completions)

    return vf.SingleTurnEnv(dataset=Dataset.from_dict({"question": ["?"]}), rubric=vf.Rubric(funcs=[rank]))
