"""`prove`: a patch's proof, run on the code that is installed, as it is and patched."""
