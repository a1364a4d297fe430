"""Makes the reports that docs/gallery.md shows, and their pictures: ``make gallery``.

From recorded runs in tests/data, and from the comparison that ``make demo`` measured. Needs Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
GALLERY = Path("docs/gallery")
IMAGES = Path("docs/images")  # those of the README and of the first page to read
_COLOURS = 64  # of a picture, a third of the bytes
_SIZE = {"width": 1100, "height": 760}  # pixels of a picture, the top of a page

# Names of pages, and the commands that make them.
MADE = {
    "straggler.html": "analyze tests/data/nccl_like/fsdp2-straggler/traces -o {page}",
    "network.html": "analyze tests/data/nccl_like/ds-zero3/traces -o {page}",
    "plan.html": "recommend tests/data/nccl_like/ds-zero3/traces --device-memory 80GiB --html {page}",
    "gloo.html": "analyze tests/data/zero_runs/fsdp2_hsdp_ungated_ac_acc4 -o {page}",
}


def main() -> None:
    (ROOT / GALLERY).mkdir(exist_ok=True)
    for name, command in MADE.items():
        words = command.format(page=GALLERY / name).split()
        subprocess.run([sys.executable, "-m", "paro_advise", *words, "--force", "-q"], cwd=ROOT, check=True)
    planned = ROOT / ".demo" / "plan.html"
    words = ["recommend", str(ROOT / ".demo" / "before"), "--html", str(planned)]
    subprocess.run([sys.executable, "-m", "paro_advise", *words, "--force", "-q"], cwd=ROOT, check=True)
    shutil.copy(ROOT / ".demo" / "report.html", ROOT / GALLERY / "comparison.html")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in (*MADE, "comparison.html"):
            page = browser.new_page(viewport=_SIZE)  # type: ignore[arg-type]  # a TypedDict of the same keys
            page.goto((ROOT / GALLERY / name).as_uri())
            picture = ROOT / GALLERY / name.replace(".html", ".png")
            page.screenshot(path=picture)
            Image.open(picture).convert("RGB").quantize(_COLOURS).save(picture, optimize=True)
        for path, shown in ((ROOT / ".demo" / "report.html", "comparison.png"), (planned, "plan.png")):
            page = browser.new_page(viewport=_SIZE)  # type: ignore[arg-type]  # as above
            page.goto(path.as_uri())
            page.screenshot(path=ROOT / IMAGES / shown)
        browser.close()


if __name__ == "__main__":
    main()
