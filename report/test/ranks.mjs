// Reads the page of a program that communicates with other ranks: node test/ranks.mjs PAGE.html
import assert from "node:assert/strict";
import { openReader } from "./reader.mjs";

const [file, executablePath] = process.argv.slice(2);
const { page, open, runSteps } = await openReader(executablePath);

const widths = (side, lane) =>
  page.locator(`figure[data-side="${side}"] .interval.${lane}`).evaluateAll((rects) => rects.map((rect) => Number(rect.getAttribute("width"))));

const steps = {
  async "the tab shows both lanes, before and after"() {
    await open(file);
    await page.locator("#tab-timeline").click();
    assert.ok(await page.locator(".timeline-view").isVisible());
    assert.match(await page.locator('figure[data-side="before"] figcaption').textContent(), /before6 collectives \(6 all_gather\)/);
    assert.match(await page.locator('figure[data-side="after"] figcaption').textContent(), /after1 collective \(1 all_gather\)/);
    assert.equal((await widths("before", "communication")).length, 6);
    assert.equal((await widths("after", "communication")).length, 1);
  },

  async "both sides have one scale, and lanes end inside the picture"() {
    const total = (values) => values.reduce((sum, value) => sum + value, 0);
    assert.ok(total(await widths("before", "communication")) > total(await widths("after", "communication")));
    const ends = await page.locator(".timeline-view .interval").evaluateAll((rects) => rects.map((rect) => Number(rect.getAttribute("x")) + Number(rect.getAttribute("width"))));
    assert.ok(Math.max(...ends) <= 1001, String(Math.max(...ends)));
  },

  async "an interval says what it is"() {
    const titles = await page.locator('figure[data-side="before"] .interval.communication title').allTextContents();
    assert.match(titles[0], /^all_gather, .*B: all_gather_into_tensor/);
  },

  async "a key opens it, and another leaves it"() {
    await page.keyboard.press("1");
    assert.ok(!(await page.locator(".timeline-view").isVisible()));
    await page.keyboard.press("5");
    assert.ok(await page.locator(".timeline-view").isVisible());
  },
};

await runSteps(steps);
