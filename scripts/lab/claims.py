"""Write docs/claims.md and the tables that follow from scorecards: python scripts/lab/claims.py [--check]"""

from claims.main import main

if __name__ == "__main__":
    raise SystemExit(main())
