"""verify: is a copied bundle what was exported, and does it compute the same on this machine?"""
