"""Published facts about the corpora: counts of rows, and digests of text (SHA-256).

Counts are from the papers, or from the card of the data set. White space at both ends of a line does not count in a
digest.
"""

WMT17_COUNTS = {
    "de-en/train": 5_906_184, "de-en/validation": 8_171, "de-en/test": 3_004,
    "fi-en/train": 2_656_542, "fi-en/validation": 8_870, "fi-en/test": 3_002,
    "lv-en/validation": 2_003, "lv-en/test": 2_001,  # the Hub has fewer training pairs than the paper
    "ru-en/train": 24_782_720, "ru-en/validation": 8_819, "ru-en/test": 3_001,
}  # fmt: skip
MULTI30K_DIGESTS = {  # of multi30k/dataset, task 1
    "test_2016_flickr.cs": "45adb85f688de8407fddcbe1b36dca15d12aab868149b337e2576f2d6d2ff8d8",
    "test_2016_flickr.de": "4be6b5b3236b79c25475c6bb829800a7ce559e9ba7a1f6c2394fe4d40be46d16",
    "test_2016_flickr.en": "399a4382932c1aadd3ceb9bef1008d388a64c76d4ae4e9d4728c6f4301cac182",
    "test_2016_flickr.fr": "57a705a12ffb81f3da3539798bdaaaa8f2df5824de3a84e0f4ea378dab959b62",
    "train.cs": "2be68b38c8d586ff4f54eb13cc6e1baaaa053695b3f070d3038303a47f2268da",
    "train.de": "67aa53ff412b6af1f47c604a623e112e2c28c61519aa7cf8a5348af21722b67a",
    "train.en": "460a15fbd157e34a7a9957ee388c1ca247fe47af3ef25fb50442af6c274e0fc6",
    "train.fr": "b47e97734763b5252a979d767955c270f2c93e9e79f8ef063f71088a26e3c5a9",
    "val.cs": "d53827e469b0a1ca8d57e9e26b2b64c4bc4b33f5479c7b03ae87ae5c882c3e33",
    "val.de": "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660",
    "val.en": "1f2a23d992769b5b3d209b0a10dd0b77c08cceb1f20dfb97ed0aafa49d107227",
    "val.fr": "05f2ed05aa5bf06567b3d7ad3121f6346ebd909265383dc79dbe08ef707b7bc2",
}
# The text of version 7bee46bc with single spaces, which is the text of github.com/LividWo/Revisit-MMT.
MULTI30K_TOKENISED_DIGESTS = {
    "test_2016_flickr.de": "c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4",
    "test_2016_flickr.en": "5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2",
    "test_2017_flickr.de": "02067e4a9402786a4fcb8c1b6f4307e4a5073ced64800abead5273b54f5f31f6",
    "test_2017_flickr.en": "c9d1dfd7a26add989382e534af235af9f0f658b2a30e7eb0efdaf142496ee54f",
    "test_2017_mscoco.de": "e2825990b8a4e5289d2cdba801d57c187810bab9b4f5d87a30c35800a0d871b6",
    "test_2017_mscoco.en": "fe69ae004d71c42ead0301e70c57de5b1b6b5fb7f52210d42b22801e98e656f3",
    "train.de": "cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505",
    "train.en": "4f7b25e9bbfc6be6ef66ea2cedd35e2c11c6fa1831979a054fba52e8d5b27c9d",
    "val.de": "97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00",
    "val.en": "46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec",
}
