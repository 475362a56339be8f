"""What Google's prebuilt images do with a Python-package job: install the packages, then run a module of theirs.

Run by the interpreter that stands for the image: `python package_start.py DIRECTORY MODULE PACKAGE ... -- ARGUMENT ...`

It needs no network: requirements have to be in that interpreter already, and those that are not end the replica.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata


def main(directory: str, module: str, *rest: str) -> None:
    """Become `python -m MODULE`. Raises SystemExit when pip fails or a requirement is missing."""
    packages, arguments = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    install(directory, packages)
    if missing := list(unmet(directory)):
        raise SystemExit(
            f"{sys.executable}, which stands for the executor image, does not satisfy: {'; '.join(missing)}. Install it "
            "there, or map the image to another interpreter; Vertex AI would download it."
        )
    paths = [directory, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    os.execve(sys.executable, [sys.executable, "-m", module, *arguments], environment)  # noqa: S606  # the job's own module


def install(directory: str, packages: Sequence[str]) -> None:
    """The packages alone, into a directory of this replica."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    if subprocess.run([*pip, "--upgrade", "--target", directory, *packages]).returncode:
        raise SystemExit(f"pip could not install {', '.join(map(os.path.basename, packages))}")


def unmet(directory: str) -> Iterator[str]:
    """What distributions in the directory require and this interpreter does not have, as in `torch>=3 (2.13.0 is there)`."""
    # The one parser that every interpreter with pip has.
    from pip._vendor.packaging.requirements import Requirement

    sys.path.insert(0, directory)
    for text in (text for found in metadata.distributions(path=[directory]) for text in found.requires or ()):
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield text
        else:
            if not requirement.specifier.contains(version, prereleases=True):
                yield f"{text} ({version} is there)"


if __name__ == "__main__":
    main(*sys.argv[1:])
