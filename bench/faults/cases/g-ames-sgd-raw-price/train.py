import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)

# living area in square feet, overall quality, age in years, baths -> sale price in dollars
n = 1600
area = (1500 + 450 * torch.randn(n)).clamp(min=400)
quality = torch.randint(1, 11, (n,)).float()
age = torch.randint(0, 100, (n,)).float()
baths = torch.randint(1, 4, (n,)).float()
x = torch.stack([area, quality, age, baths], 1)
price = 55 * area + 14_000 * quality - 400 * age + 6_000 * baths + 10_000 * torch.randn(n)

model = nn.Sequential(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loss_fn = nn.MSELoss()

for epoch in range(2):
    for i in range(0, n, 32):
        pred = model(x[i : i + 32]).squeeze(1)
        loss = loss_fn(pred, price[i : i + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (i // 32) % 5 == 0:
            print(f"epoch {epoch} batch {i // 32} mse {loss.item():.4e}")
