"""What a bundle holds of the tools, and answers by itself (`python BUNDLE doctor`).

Of the standard library only, and imported relatively, since the import root is another one there.
"""
