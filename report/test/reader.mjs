// A reader of a report, in Debian's chromium, from disk and without a network.
import { pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

export async function openReader(executablePath = "/usr/bin/chromium") {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
  const context = await browser.newContext({ viewport: { width: 1280, height: 1000 }, offline: true });
  const page = await context.newPage();
  const problems = [];
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("request", (request) => /^(file|blob|data):/.test(request.url()) || problems.push(`asked for ${request.url()}`));

  const open = async (file) => {
    await page.goto(pathToFileURL(file).href);
    await page.waitForSelector("html[data-ready]");
  };

  // Runs the steps in order and sets the exit code: a failed step does not stop the others.
  const runSteps = async (steps) => {
    let failed = 0;
    for (const [name, step] of Object.entries(steps)) {
      try {
        await step();
        console.log(`ok      ${name}`);
      } catch (error) {
        failed++;
        console.log(`FAILED  ${name}\n${error.stack}`);
      }
    }
    if (problems.length) console.log(`FAILED  the console stays empty\n${problems.join("\n")}`);
    await browser.close();
    process.exitCode = failed || problems.length ? 1 : 0;
  };
  return { page, open, runSteps };
}
