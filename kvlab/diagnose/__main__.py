"""The command moved: python -m kvlab.check"""

import sys

if __name__ == "__main__":
    print("this command is now: python -m kvlab.check (package.module:factory, or --log FILE)")
    sys.exit(2)  # could not run: 1 would say that something was found
