"""What a bundle answers by itself (`python BUNDLE doctor`).

It is in the bundle, too: of the standard library only, and imported relatively, since the import root is another there.
"""
