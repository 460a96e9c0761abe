#!/bin/sh
# transformers in three ways: in the base environment, nothing to install.
. "$(dirname "$0")/common.sh"
audit transformers-dynamic --engine transformers
audit transformers-static --engine transformers-static
audit transformers-continuous --engine transformers-continuous
