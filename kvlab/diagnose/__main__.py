"""The command moved: python -m kvlab.check"""

import sys

if __name__ == "__main__":
    sys.exit("this command is now: python -m kvlab.check package.module:factory, or --log FILE")
