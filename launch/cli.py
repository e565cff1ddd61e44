"""The command ``precache-sglang``."""

from __future__ import annotations

import sys

_USAGE = """\
usage: precache-sglang COMMAND [ARGS]

  serve    start the server: every flag of SGLang's, and --precache-*
  demo     build the demo model, compare the methods, write a table and a plot
  bench    measure methods side by side
  explain  show where two prompts part, and how they could share more
  doctor   say what platform, versions, hooks and model support were found
  model    build the demo model's folder and print where it is

precache-sglang COMMAND --help explains a command."""


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command == "serve":
        from precache_sglang.launch.serve import serve

        serve(rest)
    elif command == "demo":
        from precache_sglang.launch.demo import demo

        demo(rest)
    elif command == "bench":
        from precache_sglang.launch.bench import bench

        bench(rest)
    elif command == "explain":
        from precache_sglang.launch.explain import explain

        explain(rest)
    elif command == "doctor":
        from precache_sglang.launch.doctor import doctor

        doctor(rest)
    elif command == "model":
        from precache_sglang.launch.model import main as model

        raise SystemExit(model(rest))
    elif command in ("-h", "--help"):
        print(_USAGE)
    else:
        if command:
            print(f"precache-sglang: unknown command {command!r}\n", file=sys.stderr)
        print(_USAGE, file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
