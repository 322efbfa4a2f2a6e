"""SAM, SAM-HQ or SAM 2: the mask of what is at a point of a picture.

python examples/segmentation.py --picture street.jpg --x 500 --y 375
"""

import numpy
import torch
from common import command_line, device_and_dtype
from PIL import Image
from transformers import AutoModelForMaskGeneration, AutoProcessor

import sparge

args = command_line(__doc__, model="facebook/sam-vit-huge", picture="picture.jpg", x=500, y=375, output="mask.png")
device, dtype = device_and_dtype()
processor = AutoProcessor.from_pretrained(args.model)
model = AutoModelForMaskGeneration.from_pretrained(args.model, dtype=dtype).to(device).eval()

# The global layers of the picture's encoder look at 4096 tokens and more; those of windows, and the decoder, at few.
# SAM adds a bias of its own to every score, which a GPU reads too slowly to gain anything: there it runs dense, and
# the statistics say so. SAM 2 has none.
sparge.enable(model, args.policy or sparge.Policy(topk=args.topk))

picture = Image.open(args.picture).convert("RGB")
inputs = processor(images=picture, input_points=[[[[args.x, args.y]]]], return_tensors="pt").to(device)
sizes = [inputs.pop(name).cpu() for name in ("original_sizes", "reshaped_input_sizes") if name in inputs]
inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
with torch.inference_mode():
    outputs = model(**inputs)
masks = processor.post_process_masks(outputs.pred_masks.cpu(), *sizes)[0][0]  # of one object, several to choose from
best = outputs.iou_scores[0, 0].argmax()
Image.fromarray(masks[best].numpy().astype(numpy.uint8) * 255).save(args.output)
print(sparge.stats())
