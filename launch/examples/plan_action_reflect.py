"""The loop of plan, action and reflect as an SGLang program.

    python -m precache_sglang.launch.examples.plan_action_reflect --url http://localhost:30000

All roles read and extend one context. `plan` thinks and picks a tool, `action` writes the tool's
argument, and after an answer `reflect` judges it; an answer judged wrong starts another round.
What is said is generated. The tools are stubs: whatever is asked of them, they return what the
tools of a recorded trajectory returned, in that order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sglang as sgl
from precache_sglang.launch.trajectories import VERDICTS, Trajectory, load_trajectories

from precache_sglang.frontend import RuntimeEndpoint, gen, select

TOOLS = ["Image2Text", "BingSearch", "Retrieve", "Finish"]
# As in the trajectories on which the adapters were trained.
ACTION = "\nAction: \n### Response:\n"
ARGUMENT = "[\n### Response:\n"
REFLECT = "\nObservation: Please reflect your answer.\nThought: \n### Response:\n"
WRONG = (
    "\nObservation: The answer was judged wrong. Go on with another round."
    "\nThought: \n### Response:\n"
)


@sgl.function  # type: ignore[untyped-decorator]
def solve(s: Any, prompt: str, observations: list[str], num_answers: int = 2) -> list[str]:
    """Answer a question.

    Args:
        prompt: Instructions and question, up to where the first thought begins.
        observations: What the tools return, each up to where the next thought begins. Once
            they are used up, only an answer is left to give.
        num_answers: How many answers may be judged.

    Returns:
        The names of what was generated, in order; ``s["answer"]`` is the last answer.
    """
    names: list[str] = []

    def step(kind: str) -> str:
        names.append(f"{kind}_{len(names)}")
        return names[-1]

    s += prompt
    unread = iter(observations)
    while True:
        s += gen(step("thought"), role="plan", max_tokens=48, stop="\n")
        s += ACTION
        observation = next(unread, None)
        if observation is None:
            tool = "Finish"
            s += tool
        else:
            s += select(step("tool"), TOOLS, role="plan")
            tool = s[names[-1]]
        s += ARGUMENT
        s += gen(step("argument"), role="action", max_tokens=32, stop=["]", "\n"])
        argument = s[names[-1]]
        s += "]"
        if tool != "Finish":
            s += observation
            continue
        s["answer"] = argument
        num_answers -= 1
        s += REFLECT
        s += gen(step("reflection"), role="reflect", max_tokens=48, stop="\n")
        s += ACTION
        s += select(step("verdict"), list(VERDICTS), role="reflect")
        if s[names[-1]] == "Reflect[right]" or num_answers == 0:
            return names
        s += WRONG


def arguments_of(trajectory: Trajectory) -> dict[str, Any]:
    """The arguments of `solve` for the question of a recorded trajectory."""
    turns = trajectory.turns
    observations = []
    tool = ""
    for turn in turns[1:]:
        if turn.kind == "action_type":
            tool = turn.gold_output
        elif (turn.role, turn.kind) == ("plan", "thought") and tool != "Finish":
            observations.append(turn.input_text_appended)
    return {"prompt": turns[0].input_text_appended, "observations": observations}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m precache_sglang.launch.examples.plan_action_reflect",
        description="Agents with the roles plan, action and reflect answer recorded questions.",
    )
    parser.add_argument("--url", default="http://localhost:30000", help="default: %(default)s")
    parser.add_argument("--api-key", help="of the server, if it asks for one")
    parser.add_argument(
        "--trajectories", type=Path, help="JSON lines; default: those that come with the package"
    )
    parser.add_argument(
        "--concurrency", type=int, default=2, metavar="N", help="questions at once; default: 2"
    )
    args = parser.parse_args(argv)
    trajectories = load_trajectories(args.trajectories)
    states = solve.run_batch(
        [arguments_of(trajectory) for trajectory in trajectories],
        backend=RuntimeEndpoint(args.url, api_key=args.api_key),
        temperature=0,
        num_threads=args.concurrency,
    )
    for trajectory, state in zip(trajectories, states, strict=True):
        print(f"\n{trajectory.question}")
        for name in state.ret_value:
            counts = (state.get_meta_info(name) or {}).get("precache")
            found = f"shared {counts['shared']:>4} of {sum(counts.values()):>4}" if counts else ""
            print(f"  {name:<14} {found:<20} {' '.join(state[name].split())[:90]}")
        print(f"  answer {state['answer']!r}, recorded {trajectory.answer!r}")


if __name__ == "__main__":
    main()
