"""Write the golden files anew: `make golden`, then read the diff."""

from __future__ import annotations

from golden.normal_form import GOLDEN, documents, written

if __name__ == "__main__":
    kept = documents()
    for path in [*GOLDEN.glob("*.yaml"), *GOLDEN.glob("jobs/*.yaml")]:
        if str(path.relative_to(GOLDEN)) not in kept:
            path.unlink()
    for name, document in kept.items():
        path = GOLDEN / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(written(document))
